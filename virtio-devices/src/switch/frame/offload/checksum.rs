//! The checksum of IP, TCP and UDP (`RFC 1071`).

/// A sum of 16-bit words, in network order, without the carries.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Sum(u64);

impl Sum {
    /// Adds `bytes`, which follow an even number of bytes; an odd last one is followed by a zero.
    pub(crate) fn and(self, bytes: &[u8]) -> Self {
        let (words, rest) = bytes.as_chunks::<4>();
        let mut last = [0; 4];
        last.iter_mut().zip(rest).for_each(|(to, from)| *to = *from);
        // The machine's own order is the fastest: a sum of swapped words is the swapped sum (RFC 1071, section 2 B).
        // Frames are short: 2^32 such words would be needed for an overflow.
        let number = |word: &[u8; 4]| u64::from(u32::from_ne_bytes(*word));
        let sum = words.iter().map(number).sum::<u64>() + number(&last);
        Self(self.0 + u64::from(u16::from_be(fold(sum))))
    }

    /// Adds a number of 32 bits, such as a length.
    pub(crate) const fn and_number(self, number: u32) -> Self {
        Self(self.0 + number as u64)
    }

    /// The checksum.
    pub(crate) const fn checksum(self) -> u16 {
        !fold(self.0)
    }

    /// The checksum, for a protocol where 0 means none (`RFC 768`). Both forms of 0 are equal in a sum, so that this is
    /// right for other protocols, too.
    pub(crate) const fn checksum_not_zero(self) -> u16 {
        match self.checksum() {
            0 => 0xffff,
            checksum => checksum,
        }
    }
}

/// The sum of 16-bit words with the carries.
const fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    sum as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_that_of_the_standard() {
        // RFC 1071, section 3: the sum is ddf2.
        assert_eq!(Sum::default().and(&[0, 1, 0xf2, 3, 0xf4, 0xf5, 0xf6, 0xf7]).checksum(), !0xddf2);
        assert_eq!(Sum::default().and(&[]).checksum(), 0xffff);
        assert_eq!(Sum::default().and(&[0xff, 0xff]).checksum(), 0);
        assert_eq!(Sum::default().and(&[0xff, 0xff]).checksum_not_zero(), 0xffff);
        assert_eq!(Sum::default().and_number(0x1_0001).checksum(), !2);
    }

    #[test]
    fn parts_are_the_whole() {
        let bytes: Vec<u8> = (0..99_u8).map(|at| at.wrapping_mul(77)).collect();
        let words = |bytes: &[u8]| {
            let word = |pair: &[u8]| u32::from(pair[0]) << 8 | u32::from(pair.get(1).copied().unwrap_or(0));
            let sum: u32 = bytes.chunks(2).map(word).sum();
            !((sum & 0xffff) + (sum >> 16)) as u16
        };
        for len in 0..bytes.len() {
            let (bytes, half) = (&bytes[..len], (len / 2) & !1);
            let parts = Sum::default().and(&bytes[..half]).and(&bytes[half..]);
            assert_eq!((parts.checksum(), Sum::default().and(bytes).checksum()), (words(bytes), words(bytes)), "{len}");
        }
    }
}
