"""llama.cpp's converter on a checkpoint whose tokenizer it cannot know: one learned for these benchmarks.

python convert_gguf.py LLAMA_CPP_SOURCES CHECKPOINT [its own options]     (in llama.cpp's environment)
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    sources = Path(sys.argv.pop(1))
    sys.path[:0] = [str(sources), str(sources / "gguf-py")]
    from conversion.base import TextModel

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"  # byte-level BPE; prompts come as ids anyway
    sys.argv[0] = str(sources / "convert_hf_to_gguf.py")
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
