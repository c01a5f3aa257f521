//! The header of a frame with changed tags.

use virtio_bindings::virtio_net::VIRTIO_NET_HDR_GSO_NONE;

use super::head::{NewHead, Shift};
use crate::frames::net_protocol::header::{BadHeader, CSUM_START, GSO_TYPE, HDR_LEN, HEADER, field, needs_checksum};

/// Adjusts the header of a frame whose first bytes become `head`: offsets behind the tags move with them.
///
/// # Errors
///
/// [`BadHeader`] if a checksum would be computed over, or written to, checked bytes: it would change an address or a
/// tag after the check.
pub(crate) fn changed(mut header: [u8; HEADER], head: &NewHead) -> Result<[u8; HEADER], BadHeader> {
    if needs_checksum(&header) {
        if usize::from(field(&header, CSUM_START)) < head.checked {
            return Err(BadHeader);
        }
        move_by(&mut header, CSUM_START, head.shift)?;
    }
    // The length of all headers is a hint, and 0 if there is none.
    if u32::from(header[GSO_TYPE]) != VIRTIO_NET_HDR_GSO_NONE && usize::from(field(&header, HDR_LEN)) >= head.checked {
        move_by(&mut header, HDR_LEN, head.shift)?;
    }
    Ok(header)
}

fn move_by(header: &mut [u8; HEADER], at: usize, shift: Shift) -> Result<(), BadHeader> {
    if shift.is_none() {
        return Ok(());
    }
    let moved = shift.of(usize::from(field(header, at))).and_then(|moved| u16::try_from(moved).ok());
    let [low, high] = moved.ok_or(BadHeader)?.to_le_bytes();
    (header[at], header[at + 1]) = (low, high);
    Ok(())
}
