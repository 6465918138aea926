from __future__ import annotations

import json

ENGINE = ("--step", "11.5,0.038,0.00008,0.06", "--kv-tokens", 400_000)
SLO = ("--slo-ttft-p99", "2s", "--slo-tpot-p99", "50ms")
LENGTHS = ("--prompt-tokens", 600, "--output-tokens", 150)
OPTIONS = (*ENGINE, *SLO, *LENGTHS, "--for", "20s")


def test_its_limits_keep_answers_in_overload_that_are_lost_without_them(carpool):
    result = carpool("recommend", "--generative", *OPTIONS, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)["recommendation"]
    limits, gate, without = found["results"]
    assert [each["name"] for each in found["results"]] == ["limits", "gate", "no gate"]
    assert min(limits["goodput"], gate["goodput"]) > 1.2 * without["goodput"]
    assert min(limits["goodput"], gate["goodput"]) > 0.75 * found["capacity"]
    assert limits["refusedShare"] > without["refusedShare"] == 0
    assert found["maxConcurrency"] == found["maxNumSeqs"] < 200
    # Medians of 600 and 150 tokens; the means of such lengths are 1.3 to 1.8 times that.
    assert 1.3 * 750 < found["maxTokenConcurrency"] / found["maxConcurrency"] < 1.8 * 750


def test_what_it_prints_can_be_pasted(carpool):
    shown = carpool("recommend", "--generative", *OPTIONS).output
    for part in (
        "--max-num-seqs ",
        "--max-num-active-seqs",
        "--max-num-queued-tokens ",
        "--max-num-batched-tokens ",
        "maxConcurrency: ",
        "maxTokenConcurrency: ",
        "policy: {slo: {ttft: {p99: 2s}, tpot: {p99: 50ms}}}",
        "- capacity: ",
    ):
        assert part in shown


def test_the_same_limits_at_any_load_below_and_the_exit_code_says_whether_they_meet_the_slo(carpool):
    calm = carpool("recommend", "--generative", *OPTIONS, "--rate", 4, "--json")
    busy = carpool("recommend", "--generative", *OPTIONS, "--rate", 15, "--json")
    few, many = (json.loads(each.output)["recommendation"] for each in (calm, busy))
    assert few["maxNumSeqs"] == many["maxNumSeqs"]
    assert (calm.exit_code, few["holds"]) == (0, True)
    assert (busy.exit_code, many["holds"]) == (1, False)


def test_a_tight_target_or_a_small_cache_takes_fewer_sequences(carpool):
    def sequences(*options):
        result = carpool("recommend", "--generative", *ENGINE, *LENGTHS, "--for", "20s", "--json", *options)
        return json.loads(result.output)["recommendation"]["maxNumSeqs"]

    usual = sequences(*SLO)
    assert sequences("--slo-ttft-p99", "2s", "--slo-tpot-p99", "25ms") < usual
    assert sequences(*SLO, "--kv-tokens", 20_000) < usual


def test_a_target_that_one_request_misses_is_refused(carpool):
    result = carpool("recommend", "--generative", *ENGINE, *LENGTHS, "--slo-ttft-p99", "2s", "--slo-tpot-p99", "5ms")
    assert result.exit_code == 1
    assert "raise --slo-tpot-p99" in result.output


def test_the_bound_is_named(carpool):
    shown = carpool("recommend", "--generative", *OPTIONS, "--kv-tokens", 20_000).output
    assert "the KV cache (20000 tokens) is full then" in shown
    shown = carpool("recommend", "--generative", *OPTIONS, "--max-num-seqs", 8).output
    assert "--max-num-seqs 8 is reached then" in shown
