"""Data sets of prompts: loading, encoding and the order in which ranks take them."""

from rft_trainer.data.blending import BlendedDataset, BlendSampler, Sampler
from rft_trainer.data.demonstrations import Demonstration, Demonstrations, encode_demonstrations
from rft_trainer.data.loading import load_hub, load_jsonl, load_parquet, load_records
from rft_trainer.data.prompts import EncodedPrompt, PromptDataset
from rft_trainer.data.records import FieldOptions, Message, PromptRecord, RecordFields
from rft_trainer.data.sampling import DataSampler, SamplerState
from rft_trainer.data.source import DataSource, load_source, parse_sources

__all__ = [
    "BlendSampler",
    "BlendedDataset",
    "DataSampler",
    "DataSource",
    "Demonstration",
    "Demonstrations",
    "EncodedPrompt",
    "FieldOptions",
    "Message",
    "PromptDataset",
    "PromptRecord",
    "RecordFields",
    "Sampler",
    "SamplerState",
    "encode_demonstrations",
    "load_hub",
    "load_jsonl",
    "load_parquet",
    "load_records",
    "load_source",
    "parse_sources",
]
