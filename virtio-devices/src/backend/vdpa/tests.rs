//! A vDPA device over a scripted kernel: the order of requests, and the effect of each answer.

mod doorbells;
mod follow;
mod isolation;
mod lifecycle;
mod memory;
mod refusals;

use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_net::VIRTIO_NET_F_STATUS;

use super::testing::*;
use super::{Vdpa, VdpaSpec};
use crate::DmaSpace;
use crate::backend::{QueueRun, QueueRunner, RunnerQueue, StartError};
use crate::frames::net_protocol::Offloads;

const NEGOTIATED: u64 = 1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_NET_F_STATUS;

fn spec(queue_pairs: u16) -> VdpaSpec {
    VdpaSpec { path: PATH.into(), mac: None, queue_pairs }
}

/// Starts both queues of a pair.
fn start(vdpa: &mut Vdpa, positions: [u16; 2], untouched: bool) -> Result<(), StartError> {
    start_with(vdpa, &[queue(0, positions[0]), queue(1, positions[1])], NEGOTIATED, untouched)
}

fn start_with(vdpa: &mut Vdpa, queues: &[RunnerQueue], features: u64, untouched: bool) -> Result<(), StartError> {
    let dma = DmaSpace::from(vdpa.memory.clone());
    start_behind(vdpa, &dma, queues, features, untouched)
}

fn start_behind(
    vdpa: &mut Vdpa,
    dma: &DmaSpace,
    queues: &[RunnerQueue],
    features: u64,
    untouched: bool,
) -> Result<(), StartError> {
    let (memory, offloads, active_pairs) = (vdpa.memory.clone(), Offloads::empty(), 1);
    vdpa.start(&QueueRun {
        queues,
        features,
        memory: &memory,
        dma,
        offloads,
        active_pairs,
        fresh: untouched,
        untouched,
    })
}
