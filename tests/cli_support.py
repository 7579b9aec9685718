"""A random checkpoint with a tokenizer and a chat template, and the command line run inside the test's process."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import string
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from localllm.cli.dispatch import dispatch
from localllm.cli.interrupts import Interrupts

REPOSITORY = Path(__file__).parent.parent
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# As Llama 2 has it: the turn of the assistant begins behind ordinary text.
TURNS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
WORDS = ["▁Once", "▁upon", "▁a", "▁time", "▁fox", "▁there", "▁was", "▁and", "▁[", "INST", "]", "▁[/", "▁Tell", "▁me"]


def write_checkpoint(
    directory: Path,
    *,
    hidden: int = 64,
    layers: int = 2,
    context: int = 512,
    seed: int = 0,
    write_tokenizer: Callable[[Path], int] | None = None,
    **more: Any,
) -> Path:
    """A Llama of random weights that says anything but the end of its answer: it has no EOS. write_tokenizer: into a
    folder; gives the number of its tokens. more: of its config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    vocab_size = (write_tokenizer or _write_tokenizer)(directory)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "eos_token_id": None,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        **more,
    }
    (directory / "config.json").write_text(json.dumps(config))
    save_file(_weights(config, seed), directory / "model.safetensors")
    return directory


def _write_tokenizer(directory: Path) -> int:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|bos|>", "<|user|>", "<|assistant|>", "<|system|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["once upon a time there was a fox who found a lantern " * 3], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    roles = {"bos_token": "<|bos|>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(roles))
    return int(tokenizer.get_vocab_size())


def write_sentencepiece(directory: Path, template: str = TURNS) -> int:
    """A tokenizer with the normalizer and the decoder of Llama 2, which drops the blank in front of a text."""
    letters = ["▁", "[", "/", "]", "!", ".", "<", "|", ">", *string.ascii_letters]
    merges = list(dict.fromkeys((word[:end], word[end]) for word in WORDS for end in range(1, len(word))))
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *map("".join, merges)]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    turn = AddedToken("<|assistant|>", rstrip=True, normalized=False)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", "<|end|>", turn])
    tokenizer.save(str(directory / "tokenizer.json"))
    roles = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(roles))
    return int(tokenizer.get_vocab_size())


def write_chain(directory: Path, *tokens: str, **options: Any) -> Path:
    """A checkpoint that answers each of these tokens of `write_sentencepiece` with the next one."""
    write_checkpoint(directory, **{"write_tokenizer": write_sentencepiece, **options})
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()  # what comes out is the embedding of the last token
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"].zero_()
    for before, after in itertools.pairwise(map(tokenizer.token_to_id, tokens)):
        head[after] += 10 * embedding[before] / embedding[before].norm()
    save_file(tensors, directory / "model.safetensors")
    return directory


def _weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * 0.05).to(torch.bfloat16)

    ones = torch.ones(hidden, dtype=torch.bfloat16)
    tensors = {"model.embed_tokens.weight": matrix(vocab, hidden), "lm_head.weight": matrix(vocab, hidden)}
    tensors["model.norm.weight"] = ones.clone()
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, rows in (("q_proj", hidden), ("k_proj", kv), ("v_proj", kv), ("o_proj", hidden)):
            tensors[f"{prefix}self_attn.{name}.weight"] = matrix(rows, hidden)
        for name, shape in (
            ("gate_proj", (inner, hidden)),
            ("up_proj", (inner, hidden)),
            ("down_proj", (hidden, inner)),
        ):
            tensors[f"{prefix}mlp.{name}.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = ones.clone()
    return tensors


@dataclass(frozen=True)
class Result:
    code: int
    out: bytes
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def error_lines(self) -> list[str]:
        """The four labelled lines of an error."""
        return [line for line in self.err.splitlines() if line.split(":")[0] in ("error", "why", "fix", "more")]


def run_cli(*arguments: str | Path, stdin: bytes = b"") -> Result:
    """One command line, in this process: no terminal anywhere."""
    with _streams(stdin) as (out, err):
        code = dispatch([str(argument) for argument in arguments], Interrupts())
        sys.stdout.flush()
        sys.stderr.flush()
        return Result(code, out.getvalue(), err.getvalue().decode())


@contextmanager
def _streams(stdin: bytes) -> Iterator[tuple[io.BytesIO, io.BytesIO]]:
    saved = sys.stdin, sys.stdout, sys.stderr
    out, err = io.BytesIO(), io.BytesIO()
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
    # Another encoding than UTF-8: what is printed must not depend on the locale.
    sys.stdout, sys.stderr = (io.TextIOWrapper(stream, encoding="latin-1") for stream in (out, err))
    try:
        yield out, err
    finally:
        sys.stdin, sys.stdout, sys.stderr = saved


def share_kernels(cache: Path) -> Path:
    """Make a cache folder in which nothing is but the kernels that tests have compiled: 0.1 s each."""
    compiled = Path(os.environ["LOCALLLM_CACHE"], "kernels")
    compiled.mkdir(parents=True, exist_ok=True)
    cache.mkdir(parents=True, exist_ok=True)
    (cache / "kernels").symlink_to(compiled.resolve())
    return cache


def environment(home: Path, **variables: str) -> dict[str, str]:
    """A child's environment with folders of its own and no setting of the developer's."""
    if not (home / "cache").exists():
        share_kernels(home / "cache")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LOCALLLM_", "HF_"))}
    folders = {"LOCALLLM_HOME": str(home), "HF_HOME": str(home / "hf"), "PYTHONPATH": str(REPOSITORY)}
    return {**kept, **folders, "OMP_NUM_THREADS": "1", "TERM": "xterm-256color", **variables}


def write_settings(folder: Path, text: str) -> None:
    """The settings file of the fixture `own_folders`."""
    (folder / "home" / "config").mkdir(parents=True)
    (folder / "home" / "config" / "config.toml").write_text(text)


def ask(model: Path, *arguments: str, stdin: bytes = b"") -> Result:
    """`run` with a prompt, a seed and an answer of four tokens."""
    return run_cli("run", model, "-p", "the fox", "--max-tokens", "4", "--seed", "1", *arguments, stdin=stdin)


def start_cli(home: Path, *arguments: str | Path, **options: Any) -> subprocess.Popen[bytes]:
    """The command in a process of its own; `options` as Popen takes them."""
    environ = environment(home, **options.pop("variables", {}))
    command = [sys.executable, "-m", "localllm", *map(str, arguments)]
    return subprocess.Popen(command, env=environ, cwd=home, **options)


class ForkedCommand(subprocess.Popen[bytes]):
    """The command in a fork of this process, which has imported all of it: a fresh one takes a second to be there."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any,
                       env: Any, startupinfo: Any, creationflags: Any, shell: Any, *pipes: Any) -> None:  # fmt: skip
        self.pid = os.fork()
        if self.pid == 0:
            try:
                for descriptor, source in enumerate((pipes[0], pipes[3], pipes[5])):
                    os.dup2(source if source != -1 else descriptor, descriptor)
                _run_here(args, preexec_fn, cwd, env)
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(70)
        self._child_created = True
        self._close_pipe_fds(*pipes[:6])  # type: ignore[attr-defined]


def _run_here(arguments: list[str], preexec_fn: Callable[[], None] | None, cwd: Path, env: dict[str, str]) -> None:
    from localllm.cli import main

    os.closerange(3, 1024)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if preexec_fn is not None:
        preexec_fn()
    sys.argv = ["localllm", *arguments]
    sys.stdin, sys.stdout, sys.stderr = map(os.fdopen, range(3), ("r", "w", "w"))
    main()


def fork_cli(home: Path, *arguments: str | Path, **options: Any) -> subprocess.Popen[bytes]:
    """`start_cli`, in a fork of this process: for what happens after the start."""
    environ = environment(home, **options.pop("variables", {}))
    return ForkedCommand([*map(str, arguments)], env=environ, cwd=home, **options)
