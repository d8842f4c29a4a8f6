"""The matrices and other parameters of golf, GPT-2 small and a model of 1.3B: for optimizer*.py and communication.py."""

# (count, rows, cols) of the matrices, and shapes of everything else.
MODELS: dict[str, tuple[list[tuple[int, int, int]], list[tuple[int, ...]]]] = {
    "golf": (
        [(22, 512, 512), (22, 256, 512), (11, 1536, 512), (11, 512, 1536)],
        [(1024, 512), (1536, 128), (512, 128), (1024, 128), (256, 128), *[(512,)] * 58, *[(8,)] * 12],
    ),
    "GPT-2 small": (
        [(12, 2304, 768), (12, 768, 768), (12, 3072, 768), (12, 768, 3072)],
        [(50257, 768), (1024, 768), *[(768,)] * 98, *[(3072,)] * 12, *[(2304,)] * 12],
    ),
    # 24 layers of width 2048: query, key, value and output apart. Its matrices alone.
    "1.3B": ([(96, 2048, 2048), (24, 8192, 2048), (24, 2048, 8192)], []),
}
