"""environment.txt: its facts, without secrets."""

import re

from trainer.run.environment import environment, write_environment
from trainer.text import redact


def test_secrets_are_removed_and_tokens_of_text_are_not():
    clean = redact(
        {
            "hf_token": "s1",
            "nested": [
                {"api_key": "s2", "apikey": "s3", "AWS_SECRET_ACCESS_KEY": "s4"}
            ],
            "db": {"password": "s5", "url": "https://user:s6@host/x", "token": None},
            "tokenizer": "gpt2",
            "batch_tokens": 64,
            "key": "plain",
        }
    )
    assert not re.search(r"s\d", str(clean))
    assert clean["db"]["url"] == "https://host/x"
    assert clean["db"]["token"] is None
    others = clean["tokenizer"], clean["batch_tokens"], clean["key"]
    assert others == ("gpt2", 64, "plain")


def test_the_environment_says_versions_and_devices_but_no_secrets(
    tmp_path, monkeypatch
):
    for name in ("MY_TOKEN", "JAX_API_LOGIN"):
        monkeypatch.setenv(name, "hidden")
    monkeypatch.setenv("JAX_ENABLE_CHECKS", "false")
    (tmp_path / "environment.txt").write_bytes(b"damaged \xff\n")
    overrides = ["seed=1", "x.password=hidden"]
    facts = {"parameters": "1", "text": "a\n\nparameters: 3"}
    write_environment(tmp_path, facts, overrides)
    write_environment(tmp_path, {"parameters": "2"}, overrides)  # a resumed run
    text = (tmp_path / "environment.txt").read_text()
    assert text.startswith("damaged ")
    assert text.count(f"jax: {environment()['jax']}\n") == 2
    assert "devices: 8 x cpu (cpu)\n" in text
    assert "overrides: seed=1 x.password=(removed)\n" in text
    assert "JAX_ENABLE_CHECKS: false\n" in text
    assert re.findall("^parameters: (.*)$", text, re.MULTILINE) == ["1", "2"]
    assert "hidden" not in text
