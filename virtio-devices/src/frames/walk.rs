//! Limits and cost of walking the descriptors of frames. A chain may have as many empty descriptors as its table holds,
//! so a frame's length does not bound the work for its buffers.

use crate::DmaView;
use crate::frames::net_protocol::MAX_READ;
use crate::queue::iovecs::Bounds;

/// The most descriptors that are read for one frame on either side: 64 KiB in pieces of 65 bytes. Drivers use some 50.
const MOST: usize = 1024;
/// The same for memory that an IOMMU translates, where each piece is looked up in its mappings.
const MOST_TRANSLATED: usize = 512;
/// The most descriptors that are read for all segments that a switch makes of a frame: 19 for each of 150.
const MOST_OF_SEGMENTS: usize = 3072;
/// The same for translated memory.
const MOST_OF_SEGMENTS_TRANSLATED: usize = 1024;
/// A descriptor's cost, in bytes copied in the same time.
const PRICE: usize = 48;
/// The same for translated memory.
const PRICE_TRANSLATED: usize = 192;
/// The descriptors that the base cost of a frame covers, in addition to those for its bytes.
const FREE: usize = 8;
/// The bytes of a frame whose cost covers a further descriptor.
const BYTES: usize = 64;
/// The cost limit of a batch of frames, in bytes, not counting its last frame. Copying this much with cold caches takes
/// 100 us; together with the longest frame, with all descriptors read for it, it takes less than 200 us. The round's
/// credit of a port of the usual weight is less.
pub(crate) const BATCH_COST: usize = 192 << 10;
/// The same for a queue over a tap, whose worker has no other queue: system calls make shorter batches slower. Bounds
/// the time that the host waits when it changes the NIC's policy.
pub(crate) const TAP_BATCH_COST: usize = 512 << 10;

/// The most descriptors of one frame's buffers in `memory`. A longer chain is refused; a receive ring in which one
/// frame needs more is invalid.
pub(crate) fn most(memory: &DmaView) -> usize {
    if memory.is_translated() { MOST_TRANSLATED } else { MOST }
}

/// The bounds of a chain of one frame in `memory`. They still allow detecting a frame that is too long.
pub(crate) fn bounds(memory: &DmaView) -> Bounds {
    Bounds { pieces: most(memory), enough: MAX_READ + 1 }
}

/// The most descriptors of the buffers of all segments that a switch makes of one frame. Further segments are dropped.
pub(crate) fn most_of_segments(memory: &DmaView) -> usize {
    if memory.is_translated() { MOST_OF_SEGMENTS_TRANSLATED } else { MOST_OF_SEGMENTS }
}

/// The cost of reading `walked` descriptors in `memory` for a frame of `bytes`, beyond the cost of any frame of that
/// length.
pub(crate) fn price(walked: usize, bytes: usize, memory: &DmaView) -> usize {
    let further = walked.saturating_sub(FREE + bytes / BYTES);
    further.saturating_mul(if memory.is_translated() { PRICE_TRANSLATED } else { PRICE })
}

#[cfg(test)]
mod tests {
    use vm_memory::GuestAddress;

    use super::*;
    use crate::GuestMap;

    #[test]
    fn usual_buffers_of_a_frame_cost_nothing_more() {
        let memory = DmaView::identity(&GuestMap::from_ranges(&[(GuestAddress(0), 4096)]).unwrap());
        // Pages, buffers of a usual frame's length, one buffer, and small ones.
        for (walked, bytes) in [(19, 65_549), (43, 65_549), (8, 60), (512, 65_549)] {
            assert_eq!(price(walked, bytes, &memory), 0, "{walked} {bytes}");
        }
        assert_eq!(price(1022, 1514, &memory), (1022 - 8 - 23) * PRICE);
    }
}
