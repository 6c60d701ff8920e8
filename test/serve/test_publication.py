"""Who may serve while weights are published, without Ray: every order of begin, commit, abort and join."""

from __future__ import annotations

from sglang.srt.ray.serve.publication import Publication, PublishedWeights


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def opened(publication: Publication, transaction: str, number: int, *replicas: str) -> None:
    for replica in replicas:
        publication.opened(transaction, replica, version=str(number), sequence=number, ttl_s=10.0)


def test_everybody_may_serve_while_nothing_was_published():
    assert Publication().may_serve("default", 0)


def test_a_newcomer_with_the_checkpoint_may_not_serve_once_a_version_is_published():
    publication = Publication()
    opened(publication, "t1", 1, "a", "b")
    assert publication.covers("t1") == {"a", "b"}
    publication.committed("t1")
    assert publication.published == PublishedWeights(version="1", sequence=1)
    assert not publication.may_serve("default", publication.generation)
    assert publication.may_serve("1", publication.generation)


def test_nobody_is_admitted_during_a_transaction_nor_with_what_was_read_before_it():
    publication = Publication()
    opened(publication, "t1", 1, "a")
    publication.committed("t1")
    before = publication.generation
    opened(publication, "t2", 2, "a")
    assert not publication.may_serve("1", before)
    assert not publication.may_serve("1", publication.generation)
    publication.aborted("t2")
    assert not publication.may_serve("1", before), "its peer may have been written to meanwhile"
    assert publication.may_serve("1", publication.generation)


def test_a_publisher_that_vanished_holds_nobody_up_for_longer_than_its_time():
    clock = Clock()
    publication = Publication(clock)
    opened(publication, "t1", 1, "a")
    assert publication.in_progress
    clock.now = 11.0
    assert not publication.in_progress
    assert publication.may_serve("default", publication.generation)


def test_the_second_replica_to_resume_changes_nothing():
    publication = Publication()
    opened(publication, "t1", 1, "a", "b")
    publication.committed("t1")
    publication.committed("t1")
    assert publication.covers("t1") == set()
    assert publication.published == PublishedWeights(version="1", sequence=1)


def test_only_newer_weights_are_remembered():
    publication = Publication()
    publication.remember(PublishedWeights(version="2", sequence=2))
    publication.remember(PublishedWeights(version="1", sequence=1))
    assert publication.published == PublishedWeights(version="2", sequence=2)
