"""`/tokenize`, `/detokenize` and `/tokenizer_info`: the model's tokenizer over HTTP."""

from __future__ import annotations

from jaxserve.serving.chat import render
from jaxserve.serving.chat_protocol import TokenizeChatRequest
from jaxserve.serving.errors import RefusedError, checking
from jaxserve.serving.generation import Served
from jaxserve.serving.protocol import DetokenizeRequest, TokenizeCompletionRequest, check_model
from jaxserve.serving.responses import Detokenized, TokenizerInfo, Tokens


def tokenize(served: Served, body: TokenizeCompletionRequest | TokenizeChatRequest) -> Tokens:
    """Token ids of a text, or of the prompt of a chat."""
    check_model(body.model, served.names)
    with checking():
        tokenizer = served.engine.get_tokenizer()
        text = body.prompt if isinstance(body, TokenizeCompletionRequest) else render(served, body)
        ids = tokenizer.encode(text, body.add_special_tokens)  # half a surrogate pair is no text
    strings = [tokenizer.backend.id_to_token(i) or "" for i in ids] if body.return_token_strs else None
    return Tokens(len(ids), served.engine.config.scheduler.max_model_len, ids, strings)


def detokenize(served: Served, body: DetokenizeRequest) -> Detokenized:
    """The text of token ids, special tokens included."""
    check_model(body.model, served.names)
    with checking():
        tokenizer = served.engine.get_tokenizer()
    unknown = [i for i in body.tokens if i >= served.engine.config.model.vocab_size]
    if unknown:
        message = f"tokens: {unknown[0]} is out of vocabulary [0, {served.engine.config.model.vocab_size})"
        raise RefusedError(message, param="tokens")
    return Detokenized(tokenizer.decode(body.tokens, skip_special_tokens=False))


def tokenizer_info(served: Served) -> TokenizerInfo:
    """Facts of the tokenizer, for clients that tokenise by themselves."""
    with checking():
        tokenizer = served.engine.get_tokenizer()
    special = {name: tokenizer.special_tokens.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    return TokenizerInfo(
        tokenizer_class="PreTrainedTokenizerFast",
        vocab_size=tokenizer.vocab_size,
        model_max_length=served.engine.config.scheduler.max_model_len,
        **special,
        eos_token_ids=sorted(served.engine.eos_token_ids),
        chat_template=tokenizer.chat_templates.get("default"),
    )
