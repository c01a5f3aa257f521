//! Checksums and segments, compared with independent computations.

mod checksums;
mod hostile;
mod segmentation;

use super::*;
use virtio_bindings::virtio_net::VIRTIO_NET_HDR_F_DATA_VALID;

pub(super) const NEEDS: u8 = VIRTIO_NET_HDR_F_NEEDS_CSUM as u8;
pub(super) const VALID: u8 = VIRTIO_NET_HDR_F_DATA_VALID as u8;
pub(super) const TCP4: u8 = VIRTIO_NET_HDR_GSO_TCPV4 as u8;
pub(super) const TCP6: u8 = VIRTIO_NET_HDR_GSO_TCPV6 as u8;
pub(super) const USO: u8 = VIRTIO_NET_HDR_GSO_UDP_L4 as u8;
pub(super) const ECN: u8 = VIRTIO_NET_HDR_GSO_ECN as u8;

/// A packet to build.
#[derive(Debug, Clone)]
pub(super) struct Made {
    pub tags: Vec<[u8; 4]>,
    pub v6: bool,
    pub tcp: bool,
    /// IPv4 options, or IPv6 extension headers.
    pub options: Vec<u8>,
    pub tcp_options: Vec<u8>,
    pub flags: u8,
    pub data: Vec<u8>,
}

impl Made {
    pub(super) fn of(v6: bool, tcp: bool, data: usize) -> Self {
        let data = (0..data).map(|at| (at * 31 + at / 251) as u8).collect();
        Self { tags: vec![], v6, tcp, options: vec![], tcp_options: vec![], flags: 0x10, data }
    }

    pub(super) fn ip(&self) -> usize {
        14 + 4 * self.tags.len()
    }

    pub(super) fn l4(&self) -> usize {
        self.ip() + if self.v6 { 40 } else { 20 } + self.options.len()
    }

    pub(super) fn headers(&self) -> usize {
        self.l4() + if self.tcp { 20 + self.tcp_options.len() } else { 8 }
    }

    /// The frame as a driver leaves it: with the sum of the pseudo-header in place of the checksum.
    pub(super) fn frame(&self) -> Vec<u8> {
        let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1];
        frame.extend(self.tags.iter().flatten());
        frame.extend(if self.v6 { [0x86, 0xdd] } else { [8, 0] });
        let number = if self.tcp { 6 } else { 17 };
        let l4_len = self.headers() - self.l4() + self.data.len();
        if self.v6 {
            let first = if self.options.is_empty() { number } else { 60 };
            let len = (l4_len + self.options.len()) as u16;
            frame.extend([0x60, 0, 0, 7]);
            frame.extend(len.to_be_bytes());
            frame.extend([first, 64]);
            frame.extend((0..32).map(|at| at * 5));
            frame.extend(&self.options);
        } else {
            let words = 5 + self.options.len() as u8 / 4;
            frame.extend([0x40 | words, 0]);
            frame.extend(((20 + self.options.len() + l4_len) as u16).to_be_bytes());
            // An ID that wraps, "don't fragment", and a wrong checksum.
            frame.extend([0xff, 0xfe, 0x40, 0, 64, number, 0xab, 0xcd, 10, 0, 0, 1, 10, 0, 0, 2]);
            frame.extend(&self.options);
        }
        if self.tcp {
            let words = 5 + self.tcp_options.len() as u8 / 4;
            // A sequence number that wraps.
            frame.extend([
                0x12,
                0x34,
                0,
                80,
                0xff,
                0xff,
                0xff,
                0,
                1,
                2,
                3,
                4,
                words << 4,
                self.flags,
                0xfa,
                0xf0,
                0,
                0,
                0,
                0,
            ]);
            frame.extend(&self.tcp_options);
        } else {
            frame.extend([0x12, 0x34, 0, 53]);
            frame.extend((l4_len as u16).to_be_bytes());
            frame.extend([0, 0]);
        }
        frame.extend(&self.data);
        let sum = fold(&pseudo_header(&frame, self.ip(), self.v6, number, l4_len));
        let at = self.l4() + self.checksum_offset();
        frame[at..at + 2].copy_from_slice(&sum.to_be_bytes());
        frame
    }

    pub(super) fn checksum_offset(&self) -> usize {
        if self.tcp { 16 } else { 6 }
    }

    /// The virtio header, with segments of `size` bytes.
    pub(super) fn header(&self, size: usize) -> [u8; HEADER] {
        let kind = match (self.tcp, self.v6) {
            (true, false) => TCP4,
            (true, true) => TCP6,
            (false, _) => USO,
        };
        header(NEEDS, kind, self.headers(), size, self.l4(), self.checksum_offset())
    }
}

/// A virtio header.
pub(super) fn header(flags: u8, kind: u8, len: usize, size: usize, start: usize, offset: usize) -> [u8; HEADER] {
    let [[a, b], [c, d], [e, f], [g, h]] = [len, size, start, offset].map(|field| (field as u16).to_le_bytes());
    [flags, kind, a, b, c, d, e, f, g, h, 0, 0]
}

/// The pseudo-header of RFC 793 and RFC 8200, written out.
fn pseudo_header(frame: &[u8], ip: usize, v6: bool, number: u8, l4_len: usize) -> Vec<u8> {
    if v6 {
        let len = (l4_len as u32).to_be_bytes();
        [&frame[ip + 8..ip + 40], &len, &[0, 0, 0, number]].concat()
    } else {
        let len = (l4_len as u16).to_be_bytes();
        [&frame[ip + 12..ip + 20], &[0, number], &len].concat()
    }
}

/// The sum of all words, not inverted.
pub(super) fn fold(bytes: &[u8]) -> u16 {
    let mut sum = 0_u32;
    for pair in bytes.chunks(2) {
        sum += u32::from(pair[0]) * 256 + u32::from(*pair.get(1).unwrap_or(&0));
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// True if the checksums of a packet are right: their sums are all ones.
pub(super) fn is_right(made: &Made, frame: &[u8], check_ip: bool) -> bool {
    let number = if made.tcp { 6 } else { 17 };
    let l4 = &frame[made.l4()..];
    let pseudo = pseudo_header(frame, made.ip(), made.v6, number, l4.len());
    let ip_right = made.v6 || !check_ip || fold(&frame[made.ip()..made.l4()]) == 0xffff;
    ip_right && fold(&[&pseudo[..], l4].concat()) == 0xffff
}
