"""A reward server for one function: `python -m rft_rewards.serve --function package.module:name --port 8000`.

POST /v1/score  scores the samples of a request (see GET /schema). Requests with the same `Idempotency-Key` are scored
                once: a repeated one waits for the first and gets its reply.
GET  /health    {"status": "ok", "function": ..., "scored": samples scored, "replayed": replies given again}
GET  /schema    JSON schemas of request and reply
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rft_rewards.recipe import load_function
from rft_rewards.server import RewardServer
from rft_rewards.wire import SCORE_PATH


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the server."""
    parser = argparse.ArgumentParser(prog="python -m rft_rewards.serve", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--function", required=True, help="package.module:name of the reward function")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free port, which is printed")
    parser.add_argument("--token-file", type=Path, help="file with the bearer token that clients must send")
    options = parser.parse_args(arguments)
    token = options.token_file.read_text(encoding="utf-8").strip() if options.token_file else None
    server = RewardServer(load_function(options.function), host=options.host, port=options.port, token=token)
    print(f"scoring on http://{options.host}:{server.port}{SCORE_PATH}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()


if __name__ == "__main__":
    main()
