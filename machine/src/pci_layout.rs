//! The addresses that BARs may have, and their division among PCI segments; and the buses of segment 0, and their
//! division among its root buses.

use std::ops::Range;

use crate::arch::x86_64::layout::LAST_BUS;

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

/// A further root bus of segment 0, for the devices of a NUMA node. It has a host bridge and slots of its own, and the
/// buses up to `last` for VFs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RootBus {
    /// The number of the node.
    pub node: u32,
    /// The number of the bus, above 0.
    pub bus: u8,
    /// The last bus behind it.
    pub last: u8,
}

impl RootBus {
    /// Gives each of these nodes a root bus, in their order, from the end of segment 0. All have the same number of
    /// buses, a power of two, and bus 0 keeps at least as many. Nodes without a place get none: there are 127 places.
    pub fn of_nodes(nodes: &[u32]) -> Vec<Self> {
        let all = usize::from(LAST_BUS) + 1;
        let share = match all / (nodes.len() + 1) {
            0 => 1,
            most => 1 << most.ilog2(),
        };
        let first = all.saturating_sub(nodes.len() * share).max(share);
        let buses = (first..all).step_by(share).zip(nodes);
        let root = |(bus, node): (usize, &u32)| {
            Some(Self { node: *node, bus: u8::try_from(bus).ok()?, last: u8::try_from(bus + share - 1).ok()? })
        };
        buses.filter_map(root).collect()
    }

    /// The last bus behind bus 0 of segment 0, which has these further root buses.
    pub fn last_before(roots: &[Self]) -> u8 {
        roots.first().map_or(LAST_BUS, |root| root.bus.saturating_sub(1))
    }
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

    /// Divides the addresses of segment 0 among bus 0 and this number of further root buses, in this order.
    pub fn split_among_roots(&self, further: usize) -> Vec<Self> {
        self.split(&vec![Weights { mem32: 1, mem64: 1 }; further.saturating_add(1)])
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
    fn root_buses_share_the_buses_of_segment_0() {
        let of = |count: u32| RootBus::of_nodes(&Vec::from_iter(0..count));
        let buses = |count| of(count).iter().map(|root| (root.bus, root.last)).collect::<Vec<_>>();
        assert_eq!(buses(0), []);
        assert_eq!(buses(1), [(64, 127)]);
        assert_eq!(buses(2), [(64, 95), (96, 127)]);
        assert_eq!(buses(3), [(32, 63), (64, 95), (96, 127)]);
        assert_eq!(RootBus::of_nodes(&[1, 5])[1], RootBus { node: 5, bus: 96, last: 127 });
        for count in [4, 7, 8, 63, 64, 127] {
            let roots = of(count);
            assert_eq!(roots.len(), count as usize);
            assert!(roots.windows(2).all(|pair| pair[0].last + 1 == pair[1].bus), "{roots:?}");
            let share = roots[0].last - roots[0].bus;
            assert!(roots.iter().all(|root| root.last - root.bus == share) && roots[0].bus > share, "{roots:?}");
            assert_eq!((roots[count as usize - 1].last, RootBus::last_before(&roots)), (127, roots[0].bus - 1));
        }
        assert_eq!((of(1_000).len(), RootBus::last_before(&[])), (127, 127));
    }

    #[test]
    fn root_buses_share_the_addresses_of_segment_0() {
        assert_eq!(APERTURES.split_among_roots(0), [APERTURES]);
        let parts = APERTURES.split_among_roots(1);
        assert_eq!([&parts[0].mem32, &parts[1].mem32], [&(0xc000_0000..0xd400_0000), &(0xd400_0000..0xe800_0000)]);
        assert_eq!((parts[0].mem64.end, parts[1].mem64.end), (parts[1].mem64.start, APERTURES.mem64.end));
    }

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
