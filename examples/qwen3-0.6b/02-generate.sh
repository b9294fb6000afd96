#!/usr/bin/env bash
exec bash "$(dirname "$0")/../sft/generate.sh" qwen3-0.6b "$@"
