#!/usr/bin/env bash
exec bash "$(dirname "$0")/../sft/train-dense.sh" llama3.2-1b "$@"
