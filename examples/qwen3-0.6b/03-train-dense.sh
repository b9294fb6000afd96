#!/usr/bin/env bash
exec bash "$(dirname "$0")/../sft/train-dense.sh" qwen3-0.6b "$@"
