#!/usr/bin/env bash
# Some pages spell the script so; its name is train_deepseekv2.sh.
exec bash "$(dirname "${BASH_SOURCE[0]}")/train_deepseekv2.sh" "$@"
