//! Software offloads for receivers that lack them: computes checksums that the sender left out, and cuts segments that
//! it did not cut (`virtio 1.4 §5.1.6.2`). Works on a private copy of the frame, which no guest can change.

mod checksum;
mod malformed;
mod packet;
mod segments;

#[cfg(test)]
mod tests;

pub(crate) use checksum::Sum;
pub(crate) use malformed::Malformed;
pub(crate) use segments::Segments;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_HDR_F_NEEDS_CSUM, VIRTIO_NET_HDR_GSO_ECN, VIRTIO_NET_HDR_GSO_NONE, VIRTIO_NET_HDR_GSO_TCPV4,
    VIRTIO_NET_HDR_GSO_TCPV6, VIRTIO_NET_HDR_GSO_UDP, VIRTIO_NET_HDR_GSO_UDP_L4,
};

use crate::frames::net_protocol::Offloads;
use crate::frames::net_protocol::header::{CSUM_OFFSET, CSUM_START, FLAGS, GSO_TYPE, HEADER, field, needs_checksum};

/// The work on a frame before a receiver can have it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    /// The checksum: [`complete`].
    Checksum,
    /// The segmentation: [`Segments`], whose checksums are complete.
    Segments,
}

/// The work that the frame with this header needs before a driver with `offloads` can have it.
pub(crate) fn work(header: &[u8; HEADER], offloads: Offloads) -> Option<Work> {
    let kind = u32::from(header[GSO_TYPE]);
    let needed = match kind & !VIRTIO_NET_HDR_GSO_ECN {
        VIRTIO_NET_HDR_GSO_NONE => Offloads::empty(),
        VIRTIO_NET_HDR_GSO_TCPV4 => Offloads::TSO4,
        VIRTIO_NET_HDR_GSO_TCPV6 => Offloads::TSO6,
        VIRTIO_NET_HDR_GSO_UDP => Offloads::UFO,
        // The header has one type for both, and drivers negotiate both or none.
        VIRTIO_NET_HDR_GSO_UDP_L4 => Offloads::USO4 | Offloads::USO6,
        _ => Offloads::all(),
    };
    let ecn = if kind & VIRTIO_NET_HDR_GSO_ECN == 0 { Offloads::empty() } else { Offloads::ECN };
    if !offloads.contains(needed | ecn) {
        return Some(Work::Segments);
    }
    (needs_checksum(header) && !offloads.contains(Offloads::CHECKSUM)).then_some(Work::Checksum)
}

/// Computes the checksum that the sender of `frame` left out, if it did, and updates the header. For every protocol,
/// the sender has put the sum of the pseudo-header in the checksum field (`virtio 1.4 §5.1.6.2`).
///
/// # Errors
///
/// [`Malformed`] if the checksum is not in the frame, which is unchanged then.
pub(crate) fn complete(header: &mut [u8; HEADER], frame: &mut [u8]) -> Result<(), Malformed> {
    if !needs_checksum(header) {
        return Ok(());
    }
    let start = usize::from(field(header, CSUM_START));
    let at = start + usize::from(field(header, CSUM_OFFSET));
    let sum = Sum::default().and(frame.get(start..).ok_or(Malformed::Checksum)?).checksum_not_zero();
    frame.get_mut(at..at + 2).ok_or(Malformed::Checksum)?.copy_from_slice(&sum.to_be_bytes());
    header[FLAGS] &= !(VIRTIO_NET_HDR_F_NEEDS_CSUM as u8);
    header[CSUM_START..CSUM_OFFSET + 2].fill(0);
    Ok(())
}
