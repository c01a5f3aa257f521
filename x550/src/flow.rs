//! Flow rules: the perfect filters of the flow director (`Flow Director Filters`).
//!
//! A rule names addresses, ports, VLAN and protocol of IPv4 packets, and a queue of the NIC or none. All rules share
//! one set of masks, so a frame is found among them with one look-up.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use crate::headers::{Addresses, Headers, Protocol};
use crate::model::Model;
use crate::registers::Registers;
use crate::spec;

/// Largest number of rules.
pub(crate) const MAX: usize = 2048;

/// Bits of FDIRCTRL.
mod control {
    /// Memory for rules, 1:0; 0 for none.
    pub(super) const MEMORY: u32 = 3;
    /// Rules are compared field by field, not by a signature.
    pub(super) const PERFECT: u32 = 1 << 4;
    /// Offset of the flexible bytes in words, 20:16: the shift.
    pub(super) const FLEX_SHIFT: u32 = 16;
    /// Other fields than those of IPv4, 23:21.
    pub(super) const MODE: u32 = 7 << 21;
}

/// Bits of FDIRCMD.
pub(crate) mod command {
    /// The operation, 1:0.
    pub(crate) const OPERATION: u32 = 3;
    /// Add a rule.
    pub(crate) const ADD: u32 = 1;
    /// Remove a rule.
    pub(crate) const REMOVE: u32 = 2;
    /// Look for a rule.
    pub(crate) const QUERY: u32 = 3;
    /// The rule of the last query exists.
    pub(crate) const VALID: u32 = 1 << 2;
    /// Protocol, 6:5: 1 UDP, 2 TCP, 3 SCTP: the shift.
    pub(super) const PROTOCOL_SHIFT: u32 = 5;
    /// The rule is for IPv6.
    pub(super) const IPV6: u32 = 1 << 7;
    /// Clear all rules.
    pub(crate) const CLEAR: u32 = 1 << 8;
    /// Drop matching frames.
    pub(super) const DROP: u32 = 1 << 9;
    /// The queue is valid.
    pub(super) const QUEUE_ENABLE: u32 = 1 << 15;
    /// Queue, 22:16: the shift.
    pub(super) const QUEUE_SHIFT: u32 = 16;
    /// Pool, 29:24: the shift.
    pub(super) const POOL_SHIFT: u32 = 24;
}

/// Bits of FDIRM: fields that are not compared.
mod masked {
    pub(super) const VLAN_ID: u32 = 1 << 0;
    pub(super) const PRIORITY: u32 = 1 << 1;
    pub(super) const POOL: u32 = 1 << 2;
    pub(super) const PROTOCOL: u32 = 1 << 3;
    pub(super) const FLEXIBLE: u32 = 1 << 4;
}

/// Words from a frame's start to its type.
const TYPE: u32 = 6;
/// Bit of the last field of a rule that no frame has.
const NEVER: u32 = 1 << 31;

/// Fields: source, destination, ports, tag and flexible bytes, protocol and pool. Each in the order of its register.
type Fields = [u32; 5];

/// The fields of a frame that rules compare.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key {
    fields: Fields,
}

impl Key {
    /// The fields of a frame, from its first bytes; 82 are enough. `None` if no rule can match it, because it is not
    /// IPv4 or ends within a header.
    pub fn of(frame: &[u8]) -> Option<Self> {
        let headers = Headers::of(frame)?;
        let Addresses::V4([a, b, c, d, e, f, g, h]) = headers.addresses else { return None };
        let [i, j, k, l] = headers.ports;
        let [m, n] = headers.kind;
        let ports = u32::from(u16::from_be_bytes([i, j])) | u32::from(u16::from_be_bytes([k, l])) << 16;
        let tags = u32::from(headers.tag) | u32::from(u16::from_le_bytes([m, n])) << 16;
        let fields = [
            u32::from_le_bytes([*a, *b, *c, *d]),
            u32::from_le_bytes([*e, *f, *g, *h]),
            ports,
            tags,
            number(headers.protocol),
        ];
        Some(Self { fields })
    }

    /// The same fields for a frame that the filters of `pool` accepted. Rules that name a pool compare it; without this
    /// the frame is of pool 0.
    #[must_use]
    pub fn in_pool(mut self, pool: u16) -> Self {
        let [.., last] = &mut self.fields;
        *last = *last & 3 | u32::from(pool & 0x3f) << 8;
        self
    }
}

fn number(protocol: Protocol) -> u32 {
    match protocol {
        Protocol::Other => 0,
        Protocol::Udp => 1,
        Protocol::Tcp => 2,
        Protocol::Sctp => 3,
    }
}

/// Action of a rule on a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FlowAction {
    /// Drop it.
    Drop,
    /// Receive it in this queue of the NIC, 0 to 127, whatever pool the queue is of.
    Queue(u16),
}

/// A rule as it was added: FDIRHASH, FDIRCMD without its operation, FDIRIPSA, FDIRIPDA, FDIRPORT, FDIRVLAN.
pub type RuleState = [u32; 6];

/// The registers of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rule {
    command: u32,
    /// FDIRIPSA, FDIRIPDA, FDIRPORT, FDIRVLAN.
    registers: [u32; 4],
}

/// Bits of FDIRCMD that describe a rule.
const RULE: u32 = 0x3f7f_86e0;
/// Bits of FDIRHASH that identify a rule; another one marks the bucket as valid.
const IDENTITY: u32 = 0x7fff_1fff;

impl Rule {
    fn fields(&self) -> Fields {
        let [source, destination, ports, tags] = self.registers;
        let never = if self.command & command::IPV6 == 0 { 0 } else { NEVER };
        let pool = self.command >> command::POOL_SHIFT & 0x3f;
        [source, destination, ports, tags, self.protocol() | pool << 8 | never]
    }

    fn protocol(&self) -> u32 {
        self.command >> command::PROTOCOL_SHIFT & 3
    }

    fn action(&self) -> Option<FlowAction> {
        let queue = u16::try_from(self.command >> command::QUEUE_SHIFT & 0x7f).ok()?;
        if self.command & command::DROP != 0 {
            Some(FlowAction::Drop)
        } else {
            (self.command & command::QUEUE_ENABLE != 0).then_some(FlowAction::Queue(queue))
        }
    }
}

/// The one set of masks, for each protocol. Set bits are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Masks {
    of_protocol: [Fields; 4],
    /// True if rules compare flexible bytes elsewhere than at the type. No key has those, so no rule matches.
    elsewhere: bool,
}

impl Masks {
    fn of(registers: &Registers, model: Model) -> Self {
        let get = |offset| registers.get(offset);
        let fields = get(spec::FDIRM);
        let compared = |field: u32, bits: u32| if fields & field == 0 { bits } else { 0 };
        let is_type = get(spec::FDIRCTRL) >> control::FLEX_SHIFT & 0x1f == TYPE;
        let tags = compared(masked::VLAN_ID, 0xfff)
            | compared(masked::PRIORITY, 0xe000)
            | compared(masked::FLEXIBLE, 0xffff_0000);
        let last = compared(masked::PROTOCOL, 3) | compared(masked::POOL, 0x3f00) | NEVER;
        let sctp = if model.lacks(spec::FDIRSCTPM) { u32::MAX } else { get(spec::FDIRSCTPM) };
        let addresses = [spec::FDIRSIP4M, spec::FDIRDIP4M].map(|offset| !get(offset));
        let of_protocol = [0, get(spec::FDIRUDPM), get(spec::FDIRTCPM), sctp].map(|ports| {
            let [source, destination] = addresses;
            [source, destination, !reversed(ports), tags, last]
        });
        Self { of_protocol, elsewhere: !is_type && compared(masked::FLEXIBLE, 1) != 0 }
    }

    /// The compared part of fields of a protocol.
    fn apply(&self, protocol: u32, fields: &Fields) -> Fields {
        let mask =
            usize::try_from(protocol & 3).ok().and_then(|at| self.of_protocol.get(at)).copied().unwrap_or_default();
        let mut compared = [0; 5];
        compared.iter_mut().zip(fields.iter().zip(mask)).for_each(|(to, (field, mask))| *to = field & mask);
        compared
    }
}

/// Reverses the bits of each half.
fn reversed(ports: u32) -> u32 {
    ports.reverse_bits().rotate_right(16)
}

/// The rules as they were at one time, for the path of frames.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Flows {
    is_active: bool,
    masks: Masks,
    /// The identity and the action of the rule for each combination of compared fields.
    index: HashMap<Fields, (u32, Option<FlowAction>)>,
}

impl Flows {
    /// True if the NIC compares frames with rules. If not, it counts neither matches nor misses.
    pub fn is_active(&self) -> bool {
        self.is_active
    }

    /// True if no rule can match, so that a frame need not be parsed.
    pub fn is_empty(&self) -> bool {
        self.index.is_empty()
    }

    /// The action of the rule that matches a frame. `None` if there is none, or if it has no action. With several
    /// matching rules it is the one with the lowest software index. The cost does not depend on the number of rules.
    pub fn match_frame(&self, key: &Key) -> Option<FlowAction> {
        self.matched(key).flatten()
    }

    /// As [`Self::match_frame`]; `Some(None)` if a rule without an action matches, which counts as a match.
    pub fn matched(&self, key: &Key) -> Option<Option<FlowAction>> {
        let [.., last] = key.fields;
        if self.masks.elsewhere {
            return None;
        }
        self.index.get(&self.masks.apply(last, &key.fields)).map(|(_, action)| *action)
    }
}

/// Result of adding a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Added {
    /// It is a rule now.
    Yes,
    /// There is no room.
    Full,
    /// The NIC has no such rules at present.
    Inactive,
}

/// The rules, and the look-up that is made of them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct FlowTable {
    /// In the order of their software index.
    rules: BTreeMap<u32, Rule>,
    flows: Arc<Flows>,
}

impl FlowTable {
    /// No rules, for registers after a reset.
    pub(crate) fn new(registers: &Registers, model: Model) -> Self {
        let mut this = Self::default();
        this.rebuild(registers, model);
        this
    }

    /// The look-up.
    pub(crate) fn flows(&self) -> Arc<Flows> {
        self.flows.clone()
    }

    /// The number of rules.
    pub(crate) fn len(&self) -> usize {
        self.rules.len()
    }

    /// Removes all rules.
    pub(crate) fn clear(&mut self, registers: &Registers, model: Model) {
        self.rules.clear();
        self.rebuild(registers, model);
    }

    /// Takes over masks and mode from the registers, for all rules.
    pub(crate) fn rebuild(&mut self, registers: &Registers, model: Model) {
        let mode = registers.get(spec::FDIRCTRL);
        let is_active = mode & control::PERFECT != 0 && mode & control::MEMORY != 0 && mode & control::MODE == 0;
        let masks = Masks::of(registers, model);
        let mut index = HashMap::new();
        for (identity, rule) in self.rules.iter().filter(|_| is_active) {
            index.entry(masks.apply(rule.protocol(), &rule.fields())).or_insert((*identity, rule.action()));
        }
        self.flows = Arc::new(Flows { is_active, masks, index });
    }

    /// Free places.
    pub(crate) fn free(&self) -> usize {
        if self.flows.is_active { MAX - self.rules.len().min(MAX) } else { 0 }
    }

    /// Adds the rule `hash`, or replaces it.
    pub(crate) fn add(&mut self, hash: u32, command: u32, registers: [u32; 4]) -> Added {
        let identity = hash & IDENTITY;
        if !self.flows.is_active {
            return Added::Inactive;
        }
        self.remove(hash);
        if self.rules.len() >= MAX {
            return Added::Full;
        }
        let rule = Rule { command: command & RULE, registers };
        self.rules.insert(identity, rule);
        let flows = Arc::make_mut(&mut self.flows);
        let found = flows.index.entry(flows.masks.apply(rule.protocol(), &rule.fields()));
        let winner = found.or_insert((identity, rule.action()));
        if winner.0 >= identity {
            *winner = (identity, rule.action());
        }
        Added::Yes
    }

    /// Removes the rule `hash`. Returns true if it was one.
    pub(crate) fn remove(&mut self, hash: u32) -> bool {
        let identity = hash & IDENTITY;
        let Some(rule) = self.rules.remove(&identity) else { return false };
        let flows = Arc::make_mut(&mut self.flows);
        let fields = flows.masks.apply(rule.protocol(), &rule.fields());
        if flows.index.get(&fields).is_some_and(|(winner, _)| *winner == identity) {
            let masks = flows.masks;
            let same = |rule: &Rule| masks.apply(rule.protocol(), &rule.fields()) == fields;
            match self.rules.iter().find(|(_, rule)| same(rule)) {
                Some((next, rule)) => flows.index.insert(fields, (*next, rule.action())),
                None => flows.index.remove(&fields),
            };
        }
        true
    }

    /// The value of FDIRCMD for the rule `hash`.
    pub(crate) fn query(&self, hash: u32) -> Option<u32> {
        self.rules.get(&(hash & IDENTITY)).map(|rule| rule.command | command::VALID)
    }

    /// FDIRLEN: the length of the list of the bucket of `hash`, and the bucket.
    pub(crate) fn list(&self, hash: u32) -> u32 {
        let bucket = hash & 0x1fff;
        let len = self.rules.keys().filter(|identity| *identity & 0x1fff == bucket).count();
        u32::try_from(len.min(0x3f)).unwrap_or(0x3f) | bucket << 16
    }

    /// All rules, in the order of their identity.
    pub(crate) fn save(&self) -> Vec<RuleState> {
        let state = |(identity, rule): (&u32, &Rule)| {
            let [source, destination, ports, tags] = rule.registers;
            [*identity, rule.command, source, destination, ports, tags]
        };
        self.rules.iter().map(state).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bits_of_each_port_are_reversed() {
        assert_eq!(reversed(0x0000_0001), 0x0000_8000);
        assert_eq!(reversed(0x0001_0000), 0x8000_0000);
        assert_eq!(reversed(0xf000_000f), 0x000f_f000);
    }

    #[test]
    fn a_key_has_its_fields_in_the_order_of_the_registers() {
        let mut frame = vec![0; 12];
        frame.extend([0x81, 0, 0x20, 7, 8, 0]);
        frame.extend([0x45, 0, 0, 0, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        frame.extend([0, 53, 1, 2]);
        let key = Key::of(&frame).unwrap();
        assert_eq!(key.fields, [0x0100_000a, 0x0200_000a, 0x0102_0035, 0x0081_2007, 1]);
        let [.., last] = key.in_pool(0x45).fields;
        assert_eq!(last, 0x501);
        assert_eq!(Key::of(&frame[..37]), None);
    }
}
