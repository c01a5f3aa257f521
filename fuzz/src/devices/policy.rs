//! A VF's policy, applied to frames with any bytes that its driver sends, or that are sent to it.
//!
//! The oracle is a second implementation of the rules: it splits a frame into addresses, tags and the rest, decides,
//! and builds the frame to forward. A driver's checksum must keep its distance from the frame's end.

use virtio_devices::testing::{PolicyStep, police_received, police_sent};
use virtio_devices::{Policy, PortVlan, Trunk, VlanProtocol, VlanSet};

use crate::input::{Input, Seed};

type Mac = [u8; 6];
type Header = [u8; 12];

const OWN: Mac = [0x52, 0x54, 0, 0, 0, 1];
const GIVEN: Mac = [0x52, 0x54, 0, 0, 0, 2];
const FURTHER: Mac = [0x52, 0x54, 0, 0, 0, 3];
const BRIDGES: Mac = [0x01, 0x80, 0xc2, 0, 0, 0x0e];
const CUSTOMER: [u8; 2] = [0x81, 0x00];
const SERVICE: [u8; 2] = [0x88, 0xa8];
/// The number of tags that are parsed.
const TAGS: usize = 4;
const NEEDS_CSUM: u8 = 1;

/// A parsed frame.
#[derive(Clone)]
struct Parsed {
    addresses: [u8; 12],
    /// The first tags.
    tags: Vec<([u8; 2], [u8; 2])>,
    rest: Vec<u8>,
}

impl Parsed {
    /// `None` if it ends within its addresses, type or tags.
    fn of(frame: &[u8]) -> Option<Self> {
        let (addresses, mut rest) = frame.split_first_chunk()?;
        let mut tags = Vec::new();
        loop {
            let kind = *rest.first_chunk::<2>()?;
            if tags.len() == TAGS || ![CUSTOMER, SERVICE].contains(&kind) {
                return Some(Self { addresses: *addresses, tags, rest: rest.to_vec() });
            }
            tags.push((kind, *rest.get(2..)?.first_chunk()?));
            rest = &rest[4..];
        }
    }

    fn destination(&self) -> Mac {
        self.addresses[..6].try_into().expect("6 bytes")
    }

    fn source(&self) -> Mac {
        self.addresses[6..].try_into().expect("6 bytes")
    }

    /// The position of the first tag that is not a priority tag.
    fn decides(&self) -> Option<usize> {
        self.tags.iter().position(|(_, tag)| u16::from_be_bytes(*tag) & 0xfff != 0)
    }

    /// The protocol and the VLAN of that tag.
    fn vlan(&self) -> Option<([u8; 2], u16)> {
        let (kind, tag) = self.tags[self.decides()?];
        Some((kind, u16::from_be_bytes(tag) & 0xfff))
    }

    /// True if its VLAN is unambiguous.
    fn is_clear(&self) -> bool {
        let [a, b] = [self.rest[0], self.rest[1]];
        let is_tag = [CUSTOMER, SERVICE].contains(&[a, b]) || matches!(a, 0x91..=0x93) && b == 0;
        self.decides().is_some() || !is_tag
    }

    /// Removes priority tags before a VLAN tag.
    fn plain(&self) -> Self {
        let tags = self.tags[self.decides().unwrap_or(0)..].to_vec();
        Self { tags, ..self.clone() }
    }

    fn len(&self) -> usize {
        12 + 4 * self.tags.len()
    }

    fn bytes(&self) -> Vec<u8> {
        let tags = self.tags.iter().flat_map(|(kind, tag)| [kind[0], kind[1], tag[0], tag[1]]);
        self.addresses.into_iter().chain(tags).chain(self.rest.iter().copied()).collect()
    }
}

/// Rules of a policy, as plain numbers.
struct Rules {
    policy: Policy,
    port: Option<([u8; 2], u16, u8)>,
    trunk: Option<([u8; 2], u16, u16)>,
}

impl Rules {
    fn new(input: &mut Input<'_>) -> Self {
        let [flags, vlan, priority, first, count] = input.array();
        let (id, priority) = (1 + u16::from(vlan) % 4094, priority & 7);
        let protocol = if flags & 1 == 0 { VlanProtocol::Customer } else { VlanProtocol::Service };
        let kind = if flags & 1 == 0 { CUSTOMER } else { SERVICE };
        let (first, last) = (u16::from(first), u16::from(first) + u16::from(count));
        let port = flags & 6 == 2;
        let trunk = flags & 6 == 4;
        let policy = Policy {
            address: (flags & 8 != 0).then_some(GIVEN),
            port_vlan: port.then_some(PortVlan { id, priority, protocol }),
            trunk: trunk.then(|| Trunk { vlans: VlanSet::of([first..=last]), protocol }),
            spoof_check: flags & 16 != 0,
            trusted: flags & 32 != 0,
            ..Policy::default()
        };
        Self { policy, port: port.then_some((kind, id, priority)), trunk: trunk.then_some((kind, first, last)) }
    }

    /// True if the trunk, if there is one, has the frame's VLAN. An ID of 4095 is invalid.
    fn carries(&self, frame: &Parsed) -> bool {
        let Some((kind, first, last)) = self.trunk else { return true };
        if !frame.is_clear() {
            return false;
        }
        match frame.vlan() {
            None => first == 0,
            Some((other, id)) => kind == other && id != 4095 && (first..=last).contains(&id),
        }
    }

    fn sent(&self, frame: &[u8]) -> Result<(Parsed, Parsed), PolicyStep> {
        let frame = Parsed::of(frame).ok_or(PolicyStep::BadVlan)?;
        let Policy { trusted, spoof_check, address, .. } = self.policy;
        let (to, from) = (frame.destination(), frame.source());
        if from[0] & 1 == 1 {
            return Err(PolicyStep::SpoofedAddress);
        }
        if !trusted && to[..5] == BRIDGES[..5] && to[5] < 16 {
            return Err(PolicyStep::ReservedGroup);
        }
        let own = match address {
            Some(address) if !trusted => address,
            _ => OWN,
        };
        if spoof_check && from != own && !(trusted && from == FURTHER) {
            return Err(PolicyStep::SpoofedAddress);
        }
        if !self.carries(&frame) {
            return Err(PolicyStep::BadVlan);
        }
        let mut new = if self.trunk.is_some() { frame.plain() } else { frame.clone() };
        if let Some((kind, id, priority)) = self.port {
            if kind == CUSTOMER {
                if frame.vlan().is_some() || !frame.is_clear() {
                    return Err(PolicyStep::BadVlan);
                }
                new.tags.clear();
            }
            new.tags.insert(0, (kind, (u16::from(priority) << 13 | id).to_be_bytes()));
        }
        Ok((frame, new))
    }

    fn received(&self, frame: &[u8]) -> Result<(Parsed, Parsed), PolicyStep> {
        // The receiver has not sent the frame, so its own tags are not the cause.
        let frame = Parsed::of(frame).ok_or(PolicyStep::BadVlan)?;
        let mut new = if self.trunk.is_some() || self.port.is_some() { frame.plain() } else { frame.clone() };
        match self.port {
            Some((kind, id, _)) if frame.vlan() == Some((kind, id)) => drop(new.tags.remove(0)),
            Some(_) => return Err(PolicyStep::OtherVlan),
            None if !self.carries(&frame) => return Err(PolicyStep::OtherVlan),
            None => {}
        }
        Ok((frame, new))
    }
}

/// Expected result for a frame that the rules change into another.
fn expected(header: Header, passes: Result<(Parsed, Parsed), PolicyStep>) -> PolicyStep {
    let (frame, new) = match passes {
        Ok(frames) => frames,
        Err(step) => return step,
    };
    // The checked part includes the type after the tags.
    let (before, after) = (frame.len() + 2, new.len() + 2);
    let half = |at: usize| usize::from(u16::from_le_bytes([header[at], header[at + 1]]));
    let mut moved = header;
    let mut put = |at: usize, value: usize| {
        let value = u16::try_from(value).ok()?;
        moved[at..at + 2].copy_from_slice(&value.to_le_bytes());
        Some(())
    };
    if header[0] & NEEDS_CSUM != 0 && (half(6) < before || put(6, half(6) + after - before).is_none()) {
        return PolicyStep::BadHeader;
    }
    if header[1] != 0 && half(2) >= before && put(2, half(2) + after - before).is_none() {
        return PolicyStep::BadHeader;
    }
    PolicyStep::Passes(moved, new.bytes())
}

/// Runs the frames of `input` through a policy.
pub fn run(input: &[u8]) {
    run_to_end(input);
}

/// As [`run`]. Returns the number of frames that passed, and of those that did not.
fn run_to_end(input: &[u8]) -> (usize, usize) {
    let mut input = Input::new(input);
    let rules = Rules::new(&mut input);
    let (mut passed, mut dropped) = (0, 0);
    while !input.is_empty() {
        let [kind, to, from, tags, len] = input.array();
        let header: Header = input.array();
        let frame = frame(&mut input, [to, from, tags, len]);
        let (found, expected) = if kind & 1 == 0 {
            (police_sent(&rules.policy, OWN, &[FURTHER], header, &frame), expected(header, rules.sent(&frame)))
        } else {
            (police_received(&rules.policy, header, &frame), expected(header, rules.received(&frame)))
        };
        assert_eq!(found, expected, "{frame:02x?}");
        match found {
            PolicyStep::Passes(..) => passed += 1,
            _ => dropped += 1,
        }
    }
    (passed, dropped)
}

/// A frame from the input: addresses that are meaningful more often than by chance, then any tags and bytes.
fn frame(input: &mut Input<'_>, [to, from, tags, len]: [u8; 4]) -> Vec<u8> {
    let mut address = |choice: u8| match choice {
        0..=63 => OWN,
        64..=127 => GIVEN,
        128..=159 => FURTHER,
        160..=191 => BRIDGES,
        _ => input.array(),
    };
    let mut frame = [address(to), address(from)].concat();
    for tag in 0..tags & 7 {
        let kind = if tags >> (3 + tag % 5) & 1 == 0 { CUSTOMER } else { SERVICE };
        frame.extend(kind);
        frame.extend(input.array::<2>());
    }
    frame.extend(input.slice(len.into()));
    frame
}

/// Seeds: a frame for each rule, sent and received.
pub fn seeds() -> Vec<Vec<u8>> {
    let frames = |seed: Seed, kind: u8| {
        let addresses = [[64, 0], [64, 64], [64, 128], [160, 64], [200, 200]];
        addresses.into_iter().enumerate().fold(seed, |seed, (at, [to, from])| {
            let count = at as u8 % 4;
            let seed = seed.with([kind, to, from, count, 20]).with([1, 1, 54, 0, 100, 0, 34, 0, 16, 0, 0, 0]);
            let seed = if to == 200 { seed.with(OWN).with(GIVEN) } else { seed };
            let tags = [[0, 7], [0, 0], [0xe0, 9]];
            let seed = tags[..usize::from(count)].iter().fold(seed, |seed, tag| seed.with(tag));
            seed.with([8, 0, 0x45]).with([at as u8; 17])
        })
    };
    let policies =
        [[32, 0, 0, 0, 0], [2, 6, 3, 0, 0], [3, 6, 3, 0, 0], [4, 0, 0, 7, 2], [8 + 16, 0, 0, 0, 0], [48, 0, 0, 0, 0]];
    policies.into_iter().map(|policy| frames(frames(Seed::new().with(policy), 0), 1).done()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seed_policies_pass_frames_and_only_an_open_one_drops_none() {
        let done: Vec<_> = seeds().iter().map(|seed| run_to_end(seed)).collect();
        assert!(done.iter().all(|(passed, dropped)| *passed > 0 && passed + dropped == 10), "{done:?}");
        assert_eq!(done[0].1, 0, "{done:?}");
        assert!(done[1..].iter().all(|(_, dropped)| *dropped > 0), "{done:?}");
    }
}
