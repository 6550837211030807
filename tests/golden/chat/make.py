"""Records what transformers makes of chats with public chat templates: ids, and the difference that answers make.

    python make.py          # torch, transformers 5, jinja2; writes chats.json and two tokenizers beside this file

The templates are the texts that SmolLM2, Llama 3, Mistral 7B Instruct v0.1, Gemma and Zephyr are published with. The
tokenizers are trained here on a page of Shakespeare: a byte-level BPE as Llama 3's, and one with metaspace and bytes to
fall back on, as Llama 2's. A token is learned if it is among those that `apply_chat_template` returns for the messages
up to an answer, and not in the beginning that they share with those for the messages before it and the prompt for an
answer.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent
TEXT = (HERE.parents[2] / "experiments" / "data" / "shakespeare.txt").read_text()[:60_000]
SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|end_of_text|>")
SPECIAL += ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<bos>", "<eos>", "<start_of_turn>")
SPECIAL += ("<end_of_turn>", "<|user|>", "<|system|>", "<|assistant|>")
ALTERNATE = (
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
)
TEMPLATES = {
    "smollm2": (
        "<|im_start|>",
        "<|im_end|>",
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
        "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    ),
    "llama3": (
        "<|begin_of_text|>",
        "<|eot_id|>",
        "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
        "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}"
        "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    ),
    "mistral": (
        "<s>",
        "</s>",
        "{{ bos_token }}{% for message in messages %}" + ALTERNATE + "{% if message['role'] == 'user' %}"
        "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
        "{{ message['content'] + eos_token + ' ' }}{% else %}"
        "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}",
    ),
    "gemma": (
        "<bos>",
        "<eos>",
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{% for message in messages %}" + ALTERNATE + "{% if (message['role'] == 'assistant') %}"
        "{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + "
        "'\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}"
        "{{'<start_of_turn>model\n'}}{% endif %}",
    ),
    "zephyr": (
        "<s>",
        "</s>",
        "{% for message in messages %}\n{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + message['content'] + "
        "eos_token }}\n{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + eos_token }}\n"
        "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n"
        "{% endif %}\n{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}",
    ),
}
CHATS = (
    [("user", "Who art thou?"), ("assistant", "A poor player.")],
    [
        ("user", "  Speak, Hamlet!\n"),
        ("assistant", "\n To be,\n\nor not to be? \n"),
        ("user", "Où est le café? [INST] <|im_end"),
        ("assistant", "  Là-bas 🙂, \tmy lord"),
        ("user", "x"),
        ("assistant", "the the  the"),
    ],
    [("system", "Speak briefly."), ("user", "Good night"), ("assistant", "Good night, sweet prince.\n")],
)


def byte_level() -> Tokenizer:
    """A byte-level BPE whose tokens' spans leave out white space, as Llama 3's."""
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    model.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    return model


def metaspace() -> Tokenizer:
    """A BPE of characters with bytes to fall back on, with a space before each stretch of text, as Llama 2's."""
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    model = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = [AddedToken(token, special=True, normalized=False) for token in (*SPECIAL, *fallback)]
    trainer = trainers.BpeTrainer(vocab_size=440, special_tokens=special, show_progress=False, max_token_length=8)
    model.train_from_iterator([line for line in TEXT.splitlines() if line], trainer)
    definition = json.loads(model.to_str())
    definition["added_tokens"] = [each for each in definition["added_tokens"] if each["content"] not in fallback]
    return Tokenizer.from_str(json.dumps(definition))


def record(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]]) -> dict[str, list[int]]:
    """Return the ids of a chat, and the tokens that are learned."""

    def ids(count: int, ask: bool) -> list[int]:
        return tokenizer.apply_chat_template(
            messages[:count], add_generation_prompt=ask, tokenize=True, return_dict=False
        )

    whole = ids(len(messages), False)
    learned = [0] * len(whole)
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before, after = ids(index, True), ids(index + 1, False)
            differing = (i for i, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1])
            common = next(differing, min(len(before), len(after)))
            assert after == whole[: len(after)]
            learned[common : len(after)] = [1] * (len(after) - common)
    return {"ids": whole, "learned": learned}


def main() -> None:
    """Write the files."""
    cases = []
    for name, tokenizer in (("byte_level", byte_level()), ("metaspace", metaspace())):
        folder = HERE / name
        folder.mkdir(exist_ok=True)
        (folder / "tokenizer.json").write_text(json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False))
        for template_name, (bos, eos, template) in TEMPLATES.items():
            fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos)
            fast.chat_template = template
            for number, chat in enumerate(CHATS):
                messages = [{"role": role, "content": content} for role, content in chat]
                if messages[0]["role"] == "system" and template_name in ("mistral", "gemma"):
                    continue  # these raise an exception
                case = {"tokenizer": name, "template": template_name, "chat": number}
                cases.append(case | record(fast, messages))
    chats = [[{"role": role, "content": content} for role, content in chat] for chat in CHATS]
    templates = {
        name: {"bos_token": bos, "eos_token": eos, "chat_template": text}
        for name, (bos, eos, text) in TEMPLATES.items()
    }
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    head = json.dumps({"templates": templates, "chats": chats}, ensure_ascii=False, indent=1)
    (HERE / "chats.json").write_text(f'{head[:-2]},\n"cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
