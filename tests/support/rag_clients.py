"""Classes of LangChain, llama-index and Cohere for embeddings and rerank, unmodified; run in their own environment.

``python rag_clients.py URL EMBEDDER RANKER`` prints what each gives, as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

TEXTS = ["Good night, good night!", "a king", "Parting is such sweet sorrow"]
QUERY = "who is the king?"


def langchain_embeddings(url: str, model: str) -> list[list[float]]:
    from langchain_openai import OpenAIEmbeddings

    made = OpenAIEmbeddings(model=model, base_url=f"{url}/v1", api_key="none", check_embedding_ctx_length=False)
    return [*made.embed_documents(TEXTS), made.embed_query(QUERY)]


def llama_index_embeddings(url: str, model: str) -> list[list[float]]:
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding

    made = OpenAILikeEmbedding(model_name=model, api_base=f"{url}/v1", api_key="none")
    return [*made.get_text_embedding_batch(TEXTS), made.get_query_embedding(QUERY)]


def nodes() -> list[Any]:
    from llama_index.core.schema import NodeWithScore, TextNode

    return [NodeWithScore(node=TextNode(text=text), score=0.0) for text in TEXTS]


def scored(found: Sequence[Any]) -> list[tuple[str, float]]:
    return [(one.node.get_content(), one.score) for one in found]


def llama_index_jina(url: str, model: str) -> list[tuple[str, float]]:
    from llama_index.postprocessor.jinaai_rerank import JinaRerank

    made = JinaRerank(top_n=2, model=model, base_url=f"{url}/v1", api_key="none")
    return scored(made.postprocess_nodes(nodes(), query_str=QUERY))


def llama_index_cohere(url: str, model: str) -> list[tuple[str, float]]:
    from llama_index.postprocessor.cohere_rerank import CohereRerank

    made = CohereRerank(top_n=2, model=model, base_url=url, api_key="none")
    return scored(made.postprocess_nodes(nodes(), query_str=QUERY))


def langchain_cohere(url: str, model: str) -> list[tuple[str, float]]:
    from langchain_cohere import CohereRerank

    made = CohereRerank(model=model, base_url=url, cohere_api_key="none", top_n=2)
    return [(TEXTS[one["index"]], one["relevance_score"]) for one in made.rerank(TEXTS, QUERY)]


EMBEDDERS = (langchain_embeddings, llama_index_embeddings)
RANKERS = (llama_index_jina, llama_index_cohere, langchain_cohere)

if __name__ == "__main__":
    url, embedder, ranker = sys.argv[1:]
    found: dict[str, Any] = {run.__name__: run(url, embedder) for run in EMBEDDERS}
    sys.stdout.write(json.dumps(found | {run.__name__: run(url, ranker) for run in RANKERS}) + "\n")
