//! The event queue, for events that concern no single connection.

use vm_memory::Permissions;

use super::counters::VsockCounter;
use super::pass::{Next, Pass};
use crate::queue::iovecs::{IoVecs, Storage};
use crate::queue::ring::{BrokenRing, Ring, Used};

/// The transport reset event: all connections are closed (`VIRTIO_VSOCK_EVENT_TRANSPORT_RESET`).
const TRANSPORT_RESET: u32 = 0;

/// Sends the driver a transport reset event (`virtio 1.4 §5.10.6.7`). [`Next::More`] once it is sent.
pub(crate) fn tell_of_reset(ring: &mut Ring<'_>, pass: &mut Pass<'_>) -> Result<Next, BrokenRing> {
    let mut storage = Storage::default();
    // At most the ring's chains.
    for _ in 0..ring.size() {
        let Some(chain) = ring.next(pass.memory)? else { break };
        let head = chain.head_index();
        let mut segments = IoVecs::new(&mut storage);
        let event = TRANSPORT_RESET.to_le_bytes();
        let written = match segments.append(pass.memory, chain, Permissions::Write) {
            Ok(extent) if extent.bytes >= event.len() => segments.write_at(0, &event),
            _ => 0,
        };
        // An event has four bytes.
        ring.give_back(pass.memory, &[Used { head, len: written as u32 }])?;
        pass.interrupt(ring)?;
        if written == event.len() {
            return Ok(Next::More);
        }
        pass.tally.count(VsockCounter::RxBadChains);
    }
    Ok(if ring.expect_doorbell(pass.memory)? { Next::Room } else { Next::Doorbell })
}
