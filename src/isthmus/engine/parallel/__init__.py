"""Process groups, pipeline layout, context parallelism, DDP and FSDP."""
