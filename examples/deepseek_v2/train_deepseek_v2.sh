#!/usr/bin/env bash
# Alternative spelling of train_deepseekv2.sh that some pages use.
exec bash "$(dirname "${BASH_SOURCE[0]}")/train_deepseekv2.sh" "$@"
