//! CNI plugin that gives virtio VFs of a guest to its containers.

fn main() {}
