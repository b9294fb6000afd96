#!/usr/bin/env bash
exec bash "$(dirname "$0")/../sft/generate.sh" llama3.2-1b "$@"
