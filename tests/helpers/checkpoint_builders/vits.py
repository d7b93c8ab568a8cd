"""Vision transformers under the names of transformers and open_clip, computed in plain torch from their weights."""

import torch
import torch.nn.functional as F

WIDTH, LAYERS, HEADS, SIDE, PATCH = 24, 2, 3, 32, 8
ACTIVATIONS = {"gelu": F.gelu, "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x)}
# What each library calls the parts: of a block, of the whole.
VIT = {
    **{"block": "encoder.layer.{}.", "norm1": "layernorm_before", "norm2": "layernorm_after"},
    **{"q": "attention.attention.query", "k": "attention.attention.key", "v": "attention.attention.value"},
    **{"out": "attention.output.dense", "fc1": "intermediate.dense", "fc2": "output.dense"},
    **{"patches": "embeddings.patch_embeddings.projection", "positions": "embeddings.position_embeddings"},
    **{"token": "embeddings.cls_token", "norm": "layernorm"},
}
DINOV2 = {**VIT, "norm1": "norm1", "norm2": "norm2", "fc1": "mlp.fc1", "fc2": "mlp.fc2"}
DINOV2 |= {"scale1": "layer_scale1.lambda1", "scale2": "layer_scale2.lambda1"}
CLIP = {
    **{"block": "encoder.layers.{}.", "norm1": "layer_norm1", "norm2": "layer_norm2"},
    **{"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "out": "self_attn.out_proj"},
    **{"fc1": "mlp.fc1", "fc2": "mlp.fc2", "patches": "embeddings.patch_embedding"},
    **{"positions": "embeddings.position_embedding.weight", "token": "embeddings.class_embedding"},
    **{"before": "pre_layrnorm", "norm": "post_layernorm"},
}
OPEN_CLIP = {
    **{"block": "transformer.resblocks.{}.", "norm1": "ln_1", "norm2": "ln_2", "qkv": "attn.in_proj_"},
    **{"out": "attn.out_proj", "fc1": "mlp.c_fc", "fc2": "mlp.c_proj", "patches": "conv1"},
    **{"positions": "positional_embedding", "token": "class_embedding", "before": "ln_pre", "norm": "ln_post"},
}


def make_vit(names, seed=0):
    """Return random weights under these names."""
    drawn = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=drawn) * 0.2

    def linear(name, inputs, outputs):
        return {f"{name}.weight": random(outputs, inputs), f"{name}.bias": random(outputs)}

    def norm(name):
        return {f"{name}.weight": 1 + random(WIDTH), f"{name}.bias": random(WIDTH)}

    flat = "before" in names
    count = 1 + (SIDE // PATCH) ** 2
    state = {f"{names['patches']}.weight": random(WIDTH, 3, PATCH, PATCH)}
    if not flat:
        state[f"{names['patches']}.bias"] = random(WIDTH)
    state[names["token"]] = random(WIDTH) if flat else random(1, 1, WIDTH)
    state[names["positions"]] = random(count, WIDTH) if flat else random(1, count, WIDTH)
    for number in range(LAYERS):
        block = names["block"].format(number)
        for part in ("norm1", "norm2"):
            state |= norm(block + names[part])
        if "qkv" in names:
            state |= {f"{block}{names['qkv']}weight": random(3 * WIDTH, WIDTH)}
            state |= {f"{block}{names['qkv']}bias": random(3 * WIDTH)}
        for part in ("q", "k", "v", "out") if "q" in names else ("out",):
            state |= linear(block + names[part], WIDTH, WIDTH)
        state |= linear(block + names["fc1"], WIDTH, 2 * WIDTH) | linear(block + names["fc2"], 2 * WIDTH, WIDTH)
        state |= {block + names[part]: 1 + random(WIDTH) for part in ("scale1", "scale2") if part in names}
    return state | norm(names["norm"]) | (norm(names["before"]) if flat else {})


def encode(state, names, images, eps, act="gelu"):
    """Return the tokens (N, 1 + patches, WIDTH) behind the last norm."""

    def norm(x, name):
        return F.layer_norm(x, (WIDTH,), state[f"{name}.weight"], state[f"{name}.bias"], eps)

    def linear(x, name):
        return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    patches = F.conv2d(images, state[f"{names['patches']}.weight"], state.get(f"{names['patches']}.bias"), PATCH)
    token = state[names["token"]].reshape(1, 1, WIDTH).expand(len(images), -1, -1)
    x = torch.cat([token, patches.flatten(2).transpose(1, 2)], dim=1) + state[names["positions"]]
    x = norm(x, names["before"]) if "before" in names else x
    for number in range(LAYERS):
        block = names["block"].format(number)
        inner = norm(x, block + names["norm1"])
        if "qkv" in names:
            parts = F.linear(inner, state[f"{block}{names['qkv']}weight"], state[f"{block}{names['qkv']}bias"])
            parts = parts.chunk(3, dim=-1)
        else:
            parts = [linear(inner, block + names[part]) for part in "qkv"]
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        weights = (q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5).softmax(dim=-1)
        mixed = linear((weights @ v).transpose(1, 2).flatten(2), block + names["out"])
        x = x + mixed * (state[block + names["scale1"]] if "scale1" in names else 1)
        inner = linear(norm(x, block + names["norm2"]), block + names["fc1"])
        inner = linear(ACTIVATIONS[act](inner), block + names["fc2"])
        x = x + inner * (state[block + names["scale2"]] if "scale2" in names else 1)
    return norm(x, names["norm"])


def images_of(count=2):
    """Return normalised images."""
    return torch.randn(count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(9))
