from support import models, oracle


def test_serves(shared_engine):
    p=[5,6,7,8]
    a = shared_engine.generate(p, 8)
    oracle.assert_serves(models.new_model(models.ENGINE_SEED), p, a)
