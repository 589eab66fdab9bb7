"""The official clients of a replica, without retries."""

import anthropic
import openai


def openais(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0)


def anthropics(url: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)


def url_of(client: openai.AsyncOpenAI) -> str:
    """The address of the replica behind a client."""
    return str(client.base_url).removesuffix("/v1/")
