//! The addresses that BARs may have, and their division among PCI segments.

use std::ops::Range;

/// The addresses that BARs may have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Apertures {
    /// Below 4 GiB.
    pub mem32: Range<u64>,
    /// For BARs of 64 bits.
    pub mem64: Range<u64>,
}

/// Share of a segment in the addresses, relative to the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Weights {
    /// Weight below 4 GiB; at least 1.
    pub mem32: u32,
    /// Weight for BARs of 64 bits; at least 1.
    pub mem64: u32,
}

/// The unit in which addresses are divided among segments, in bytes.
const UNIT: u64 = 1 << 20;

impl Apertures {
    /// Divides these addresses among segments, in their order. The last one gets the rest.
    pub fn split(&self, weights: &[Weights]) -> Vec<Self> {
        let mem32 = split(&self.mem32, weights.iter().map(|weights| weights.mem32));
        let mem64 = split(&self.mem64, weights.iter().map(|weights| weights.mem64));
        mem32.into_iter().zip(mem64).map(|(mem32, mem64)| Self { mem32, mem64 }).collect()
    }
}

fn split(range: &Range<u64>, weights: impl ExactSizeIterator<Item = u32> + Clone) -> Vec<Range<u64>> {
    let sum: u128 = weights.clone().map(u128::from).sum();
    let (mut before, mut start) = (0, range.start);
    let count = weights.len();
    let parts = weights.enumerate().map(|(n, weight)| {
        before += u128::from(weight);
        let share = u128::from(range.end - range.start) * before / sum.max(1);
        let bound = range.start.saturating_add(u64::try_from(share).unwrap_or(u64::MAX)) & !(UNIT - 1);
        let end = if n + 1 == count { range.end } else { bound.clamp(start, range.end) };
        std::mem::replace(&mut start, end)..end
    });
    parts.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const APERTURES: Apertures = Apertures { mem32: 0xc000_0000..0xe800_0000, mem64: 0x1_4000_1000..0xff_0000_0000 };

    #[test]
    fn segments_share_the_addresses_by_weight() {
        let weights = |mem32, mem64| Weights { mem32, mem64 };
        assert_eq!(APERTURES.split(&[weights(5, 7)]), [APERTURES]);
        let parts = APERTURES.split(&[weights(3, 1), weights(1, 1), weights(1, 2)]);
        assert_eq!(parts[0].mem32, 0xc000_0000..0xd800_0000);
        assert_eq!(parts[1].mem32, 0xd800_0000..0xe000_0000);
        assert_eq!(parts[2].mem32, 0xe000_0000..0xe800_0000);
        let len = |part: &Apertures| part.mem64.end - part.mem64.start;
        assert!(
            len(&parts[0]).abs_diff(len(&parts[1])) <= UNIT && len(&parts[2]).abs_diff(2 * len(&parts[0])) <= 4 * UNIT
        );
        // Extreme weights: no ranges overlap, and all are inside.
        for most in [vec![weights(1, 1); 96], vec![weights(u32::MAX, 1), weights(1, u32::MAX), weights(1, 1)]] {
            let parts = APERTURES.split(&most);
            for of in [|part: &Apertures| part.mem32.clone(), |part: &Apertures| part.mem64.clone()] {
                assert!(parts.windows(2).all(|pair| of(&pair[0]).end == of(&pair[1]).start));
                assert!(parts.iter().all(|part| of(part).start <= of(part).end));
                assert_eq!(of(&parts[0]).start..of(&parts[most.len() - 1]).end, of(&APERTURES));
            }
        }
    }
}
