"""Data sets of prompts: loading, encoding and the order in which ranks take them."""

from rft_trainer.data.loading import load_hub, load_jsonl, load_parquet, load_records
from rft_trainer.data.prompts import EncodedPrompt, PromptDataset
from rft_trainer.data.records import FieldOptions, Message, PromptRecord, RecordFields
from rft_trainer.data.sampling import DataSampler, SamplerState

__all__ = [
    "DataSampler",
    "EncodedPrompt",
    "FieldOptions",
    "Message",
    "PromptDataset",
    "PromptRecord",
    "RecordFields",
    "SamplerState",
    "load_hub",
    "load_jsonl",
    "load_parquet",
    "load_records",
]
