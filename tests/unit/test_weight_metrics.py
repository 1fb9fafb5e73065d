"""Counters of shared weights: one file per series and model, summed into one time series per rank."""

import gc

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from vllm_sfa_cp.weights import metrics
from vllm_sfa_cp.weights.metrics import Collector, Counters


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(metrics.ENV_DIR, str(tmp_path))
    return tmp_path


def exposed():
    registry = CollectorRegistry()
    registry.register(Collector())
    lines = generate_latest(registry).decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))


def test_every_rank_and_series_is_exposed(folder):
    q, o = Counters("q_b_proj", "0"), Counters("o_proj", "1")
    q.add("wait_seconds", 0.25)
    q.add("wait_seconds", 0.5)
    q.add("bytes", 4096)
    o.add("windows", 2)
    found = exposed()
    labels = 'rank="0",series="q_b_proj"'
    assert float(found[f"vllm_sfa_cp_weight_wait_seconds_total{{{labels}}}"]) == 0.75
    assert float(found[f"vllm_sfa_cp_weight_bytes_total{{{labels}}}"]) == 4096
    assert float(found[f"vllm_sfa_cp_weight_fetches_total{{{labels}}}"]) == 0
    assert float(found['vllm_sfa_cp_weight_windows{rank="1",series="o_proj"}']) == 2


def test_two_models_of_a_rank_count_apart_and_are_exposed_as_one(folder):
    first, second = Counters("q_b_proj", "0"), Counters("q_b_proj", "0")
    first.add("fetches", 3)
    second.add("fetches", 4)
    first.add("fetches", 1)
    assert [c.values["fetches"] for c in (first, second)] == [4, 4]
    assert len(list(folder.iterdir())) == 2
    assert float(exposed()['vllm_sfa_cp_weight_fetches_total{rank="0",series="q_b_proj"}']) == 8


def test_a_file_being_created_waits_for_the_next_scrape(folder):
    (folder / "half.bin").write_bytes(b"{")
    Counters("o_proj", "0")
    assert sum(key.startswith("vllm_sfa_cp_weight_fetches_total") for key in exposed()) == 1


def test_without_a_folder_counters_count_and_nothing_is_exposed(monkeypatch):
    monkeypatch.delenv(metrics.ENV_DIR, raising=False)
    counters = Counters("o_proj", "0")
    counters.add("bytes", 7)
    assert counters.values["bytes"] == 7
    assert exposed() == {}


def test_snapshot_forgets_an_engine_that_is_gone(folder):
    gc.collect()
    before = metrics.snapshot()["bytes"]
    counters = Counters("o_proj", "0")
    counters.add("bytes", 5)
    assert metrics.snapshot()["bytes"] == before + 5
    del counters
    gc.collect()
    assert metrics.snapshot()["bytes"] == before


def test_the_folder_is_made_once_and_announced(monkeypatch):
    monkeypatch.delenv(metrics.ENV_DIR, raising=False)
    monkeypatch.setattr(metrics.atexit, "register", lambda *args, **kwargs: None)
    folder = metrics.make_dir()
    try:
        assert metrics.make_dir() == folder == metrics.os.environ[metrics.ENV_DIR]
    finally:
        metrics.shutil.rmtree(folder)
        metrics.os.environ.pop(metrics.ENV_DIR)
