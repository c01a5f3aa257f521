//! The device configuration, `struct virtio_net_config` (`virtio 1.4 §5.1.4`).

use std::num::NonZeroU32;

use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_MQ, VIRTIO_NET_F_MTU, VIRTIO_NET_F_SPEED_DUPLEX, VIRTIO_NET_S_ANNOUNCE, VIRTIO_NET_S_LINK_UP,
};

use super::filter::Mac;
use crate::device::config::{ConfigField, Rule};

/// The length of the fields below; the driver reads zero beyond.
const LEN: usize = 17;
/// The MTU that the driver reads.
pub(crate) const MTU: ConfigField = ConfigField::new("mtu", 10, 2, Rule::Served).of(VIRTIO_NET_F_MTU);
/// The fields.
pub(crate) const FIELDS: &[ConfigField] = &[
    ConfigField::new("mac", 0, 6, Rule::Saved),
    ConfigField::new("status", 6, 2, Rule::Announced),
    ConfigField::new("max_virtqueue_pairs", 8, 2, Rule::Same).of(VIRTIO_NET_F_MQ),
    MTU,
    ConfigField::new("speed (Mbit/s)", 12, 4, Rule::Announced).of(VIRTIO_NET_F_SPEED_DUPLEX),
    ConfigField::new("duplex", 16, 1, Rule::Announced).of(VIRTIO_NET_F_SPEED_DUPLEX),
];
/// The speed in Mbit/s of a NIC without a limit. A tap reports the same to `ethtool`.
const SPEED_WITHOUT_LIMIT: u32 = 10_000;
/// The largest speed in Mbit/s.
const MAX_SPEED: u32 = 0x7fff_ffff;
const FULL_DUPLEX: u8 = 1;

/// The device configuration of a NIC.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Config {
    /// The address.
    pub mac: Mac,
    /// True if the link is up.
    pub link_up: bool,
    /// True if the driver must announce its addresses.
    pub announce: bool,
    /// The queue pairs.
    pub queue_pairs: u16,
    /// The MTU in bytes, 0 if none is offered.
    pub mtu: u16,
    /// The limit in Mbit/s that the link's speed shows, if there is one.
    pub rate: Option<NonZeroU32>,
}

impl Config {
    /// Reads the fields at `offset`.
    pub(crate) fn read(&self, offset: u64, data: &mut [u8]) {
        let bytes = self.bytes();
        data.fill(0);
        let fields = usize::try_from(offset).ok().and_then(|offset| bytes.get(offset..)).unwrap_or_default();
        for (to, from) in data.iter_mut().zip(fields) {
            *to = *from;
        }
    }

    fn bytes(&self) -> [u8; LEN] {
        let Self { mac, link_up, announce, queue_pairs, mtu, rate } = *self;
        let speed = rate.map_or(SPEED_WITHOUT_LIMIT, |rate| rate.get().min(MAX_SPEED));
        let bit = |on, bit: u32| if on { bit as u16 } else { 0 };
        let status = bit(link_up, VIRTIO_NET_S_LINK_UP) | bit(announce, VIRTIO_NET_S_ANNOUNCE);
        let mut bytes = [0; LEN];
        bytes[..6].copy_from_slice(&mac);
        bytes[6..8].copy_from_slice(&status.to_le_bytes());
        bytes[8..10].copy_from_slice(&queue_pairs.to_le_bytes());
        bytes[10..12].copy_from_slice(&mtu.to_le_bytes());
        bytes[12..16].copy_from_slice(&speed.to_le_bytes());
        bytes[16] = FULL_DUPLEX;
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_lie_where_the_standard_has_them_and_zero_beyond() {
        let mac = [2, 3, 4, 5, 6, 7];
        let config = Config { mac, link_up: true, announce: false, queue_pairs: 4, mtu: 1500, rate: None };
        let mut data = [0xff; 24];
        config.read(0, &mut data);
        assert_eq!(data, [2, 3, 4, 5, 6, 7, 1, 0, 4, 0, 0xdc, 5, 0x10, 0x27, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
        for (offset, expected) in [(8, [4, 0]), (16, [1, 0]), (17, [0, 0]), (1 << 20, [0, 0]), (u64::MAX, [0, 0])] {
            let mut data = [0xff; 2];
            config.read(offset, &mut data);
            assert_eq!(data, expected, "{offset:#x}");
        }
        let mut status = [0xff; 2];
        Config { announce: true, ..config }.read(6, &mut status);
        assert_eq!(status, [3, 0]);
        for (rate, expected) in [(1, [1, 0, 0, 0]), (25_000, [0xa8, 0x61, 0, 0]), (u32::MAX, [0xff, 0xff, 0xff, 0x7f])]
        {
            let mut speed = [0; 4];
            Config { rate: NonZeroU32::new(rate), ..config }.read(12, &mut speed);
            assert_eq!(speed, expected, "{rate}");
        }
    }
}
