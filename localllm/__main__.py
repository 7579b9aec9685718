"""`python -m localllm` is the `localllm` command."""

from localllm.cli import main

main()
