//! The hash of receive side scaling, of addresses and ports in the order of the wire.

/// Bytes of a key.
pub(crate) const KEY: usize = 40;
/// Bytes of the longest input: the addresses and ports of IPv6.
const INPUT: usize = 36;

/// A key, as a table of what each half byte of the input adds to the hash.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Toeplitz {
    halves: Box<[[u32; 16]]>,
}

impl Toeplitz {
    pub(crate) fn new(key: &[u8; KEY]) -> Self {
        // The 32 bits of the key from bit `at` on.
        let window = |at: usize| {
            let bytes = (at / 8..).take(5).map(|n| key.get(n).copied().unwrap_or(0));
            let wide = bytes.fold(0u64, |wide, byte| wide << 8 | u64::from(byte));
            u32::try_from(wide >> (8 - at % 8) & 0xffff_ffff).unwrap_or(0)
        };
        let half = |n: usize| {
            let windows = [3, 2, 1, 0].map(|bit| window(4 * n + bit));
            let mut sums = [0; 16];
            for (value, sum) in (0u32..).zip(&mut sums) {
                let set = windows.iter().enumerate().filter(|(bit, _)| value >> bit & 1 != 0);
                *sum = set.fold(0, |sum, (_, window)| sum ^ window);
            }
            sums
        };
        Self { halves: (0..2 * INPUT).map(half).collect() }
    }

    /// The hash of `input`, of which at most 36 bytes count.
    pub(crate) fn of<'a>(&self, input: impl Iterator<Item = &'a u8>) -> u32 {
        let halves = input.flat_map(|byte| [byte >> 4, byte & 0xf]);
        let sums = halves.zip(&self.halves).map(|(half, sums)| sums.get(usize::from(half)).copied().unwrap_or(0));
        sums.fold(0, |hash, sum| hash ^ sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, Ipv6Addr};

    /// The key of Microsoft's `Verifying the RSS Hash Calculation`.
    const VERIFICATION_KEY: [u8; KEY] = [
        0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0, 0xd0, 0xca,
        0x2b, 0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30, 0xf2, 0x0c, 0x6a, 0x42, 0xb7, 0x3b,
        0xbe, 0xac, 0x01, 0xfa,
    ];

    fn hash(addresses: &[u8], ports: &[u16]) -> u32 {
        let ports: Vec<u8> = ports.iter().flat_map(|port| port.to_be_bytes()).collect();
        Toeplitz::new(&VERIFICATION_KEY).of(addresses.iter().chain(&ports))
    }

    /// X21: RSS.
    #[test]
    fn published_results_of_ipv4_are_reproduced() {
        for (destination, to, source, from, addresses, with_ports) in [
            ("161.142.100.80", 1766, "66.9.149.187", 2794, 0x323e_8fc2, 0x51cc_c178),
            ("65.69.140.83", 4739, "199.92.111.2", 14230, 0xd718_262a, 0xc626_b0ea),
            ("12.22.207.184", 38024, "24.19.198.95", 12898, 0xd2d0_a5de, 0x5c2b_394a),
            ("209.142.163.6", 2217, "38.27.205.30", 48228, 0x8298_9176, 0xafc7_327f),
            ("202.188.127.2", 1303, "153.39.163.191", 44251, 0x5d18_09c5, 0x10e8_28a2),
        ] {
            let both = [source, destination].map(|text| text.parse::<Ipv4Addr>().unwrap().octets()).concat();
            assert_eq!(hash(&both, &[]), addresses, "{source}");
            assert_eq!(hash(&both, &[from, to]), with_ports, "{source}");
        }
    }

    /// X21: RSS.
    #[test]
    fn published_results_of_ipv6_are_reproduced() {
        for (destination, to, source, from, addresses, with_ports) in [
            ("3ffe:2501:200:3::1", 1766, "3ffe:2501:200:1fff::7", 2794, 0x2cc1_8cd5, 0x4020_7d3d),
            ("ff02::1", 4739, "3ffe:501:8::260:97ff:fe40:efab", 14230, 0x0f0c_461c, 0xdde5_1bbf),
            ("fe80::200:f8ff:fe21:67cf", 38024, "3ffe:1900:4545:3:200:f8ff:fe21:67cf", 44251, 0x4b61_e985, 0x02d1_feef),
        ] {
            let both = [source, destination].map(|text| text.parse::<Ipv6Addr>().unwrap().octets()).concat();
            assert_eq!(hash(&both, &[]), addresses, "{source}");
            assert_eq!(hash(&both, &[from, to]), with_ports, "{source}");
        }
    }

    #[test]
    fn an_input_beyond_the_longest_adds_nothing() {
        let long = [0x5a; 64];
        assert_eq!(hash(&long, &[]), hash(&long[..INPUT], &[]));
        assert_eq!(hash(&[], &[]), 0);
    }
}
