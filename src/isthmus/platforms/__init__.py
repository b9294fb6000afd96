"""What the machine is: capabilities, environment defaults and peak speeds of CPU, CUDA and ROCm."""
