"""Stands in for SGLang's slot allocator and radix cache."""

import torch


class Allocator:
    """Hands out shuffled slots, whole pages at a time; slot 0's page is never handed out."""

    def __init__(self, pages: int, page_size: int = 1) -> None:
        self.page_size, self.size = page_size, pages * page_size
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(0)) + 1
        self.free_slots = (order[:, None] * page_size + torch.arange(page_size)).flatten()

    def alloc(self, need_size):
        if need_size > self.free_slots.numel():
            return None
        taken, self.free_slots = self.free_slots[:need_size], self.free_slots[need_size:]
        return taken

    def available_size(self):
        return self.free_slots.numel()

    def free(self, free_index):
        self.free_slots = torch.cat([self.free_slots, free_index])

    def free_segment(self, free_index, *, start_pos):
        """Frees whole pages, each listed slot by slot."""
        pages = free_index.view(-1, self.page_size) // self.page_size
        assert start_pos % self.page_size == 0
        assert (pages == pages[:, :1]).all()
        self.free(free_index)


def no_cache(slots):
    """Evicts nothing."""
