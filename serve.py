"""Answer a file of OpenAI batch requests with a checkpoint: `python serve.py --help`."""

import argparse
import sys
from pathlib import Path

DESCRIPTION = """\
Reads one OpenAI batch request a line and appends one result a line, flushed as it completes.

  {"custom_id": "a", "method": "POST", "url": "/v1/completions",
   "body": {"prompt": "def main(", "max_tokens": 64, "temperature": 0}}
  {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions",
   "body": {"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": "low"}}

Body: prompt (a string or a list of token ids) or messages (with tools, tool_choice, response_format, reasoning_effort:
none, low, high or max), max_tokens or max_completion_tokens, temperature (0 is greedy), top_p, top_k, min_p,
presence_penalty, frequency_penalty, repetition_penalty, logit_bias, n, seed, stop (a string or a list), echo, logprobs
and top_logprobs (up to max_top_logprobs). A result is {"id", "custom_id", "response", "error"}; "error" is
null for a completion and names what is wrong with a line otherwise. A rerun skips the requests that the output already
answers, so an interrupted batch goes on where it stopped. key=value overrides the recipe (slots, max_context,
prefill_chunk, snapshot_mib, default_max_tokens, max_top_logprobs, dtype and more: docs/serving.md).

Exit codes: 0 done (failed lines are counted and have error records), 2 a mistake in the call or its files, 75 stopped
by SIGTERM or Ctrl-C: requests that have begun are finished for up to 20 seconds, and every result is kept."""


def main() -> int:
    """Parse the command line, serve, and turn a mistake into one line and exit code 2."""
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="recipe, such as configs/serve/tiny_cpu.yaml")
    parser.add_argument(
        "--checkpoint", type=Path, required=True, help="a training run, or a released checkpoint's folder"
    )
    parser.add_argument("--input", type=Path, required=True, help="requests, .jsonl")
    parser.add_argument("--output", type=Path, required=True, help="results, .jsonl; created, or resumed")
    parser.add_argument("--tokenizer", default="", help='"bytes" or a folder; default: the checkpoint\'s own')
    parser.add_argument("--show", action="store_true", help="print prompts and completions at the end")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the recipe")
    args = parser.parse_intermixed_args()

    from k3jax.config import ConfigError, ServeRun, load_run

    try:
        run = load_run(ServeRun, args.config, args.overrides)

        from k3jax.nn.placement import join_processes
        from k3jax.serve.run import Paths, serve

        join_processes()
        paths = Paths(checkpoint=args.checkpoint, input=args.input, output=args.output, tokenizer=args.tokenizer)
        return serve(run, paths, show_answers=args.show)
    except ConfigError as error:
        print(f"serve.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
