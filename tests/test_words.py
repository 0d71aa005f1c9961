import jax
import pytest

from jaxpipe.pipeline.words import pack_words, unpack_words


@pytest.mark.parametrize("generator", ["threefry2x32", "rbg"])
def test_random_keys_survive_the_way_to_the_next_stage(generator):
    keys = jax.random.split(jax.random.key(7, impl=generator), 3)
    (back,) = unpack_words(pack_words([keys], 12 if generator == "rbg" else 6), [jax.typeof(keys)])
    assert back.dtype == keys.dtype
    assert (jax.random.key_data(back) == jax.random.key_data(keys)).all()
