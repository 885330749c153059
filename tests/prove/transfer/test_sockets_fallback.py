from rackloom.prove.transfer import fallback


def test_the_data_arrives_intact_in_another_process():
    report = fallback.run_over_sockets(3 << 20, 2)
    assert report.verified
    assert (report.total_bytes, report.iters) == (3 << 20, 2)
    assert report.avg_seconds > 0


def test_a_wrong_digest_is_not_verified(monkeypatch):
    monkeypatch.setattr(fallback, "_digest", lambda _: "of something else")
    assert not fallback.run_over_sockets(1 << 20, 1).verified
