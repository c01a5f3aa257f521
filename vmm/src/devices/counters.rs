//! Counters of NICs, which come from this program or from the host's kernel; some backends have none.

use std::collections::HashMap;
use std::fs;
use std::sync::Arc;

use virtio_devices::{BackendKind, Counter, HostNic, Net, NetCounters};

use crate::config::BackendPlan;

/// Counters that this program keeps for a NIC whose frames it does not see.
const OF_CONTROL: [Counter; 3] = [Counter::ControlCommands, Counter::ControlRefused, Counter::BrokenRings];

/// Counters by name.
type Counts = Vec<(&'static str, u64)>;

/// Counters of a network function.
pub(crate) struct NicCounters {
    own: Arc<NetCounters>,
    frames: Frames,
}

/// Source of frame counters.
enum Frames {
    /// This program.
    Own,
    /// The interface of this name in the host's kernel, counting from `before`.
    Interface { name: String, before: Traffic },
    /// None: the backend has no counters.
    Unknown,
}

/// Frames and bytes as a guest sees them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Traffic {
    rx_frames: u64,
    rx_bytes: u64,
    tx_frames: u64,
    tx_bytes: u64,
}

impl NicCounters {
    /// The counters of newly created functions, each with its plan. A tap that was passed in may be in another network
    /// namespace; an interface with the same name is then another one.
    pub(crate) fn of<'a>(functions: impl Iterator<Item = (&'a Net, &'a BackendPlan)>) -> Vec<Self> {
        let mut read = Interfaces::default();
        let mut frames = |net: &Net, plan| Frames::of(net.backend_kind(), net.backend_name(), plan, &mut read);
        functions.map(|(net, plan)| Self { own: net.counters(), frames: frames(net, plan) }).collect()
    }

    /// Counters of a function whose frames this program carries.
    pub(crate) fn of_own(own: Arc<NetCounters>) -> Self {
        Self { own, frames: Frames::Own }
    }

    /// The counters of the same function over another backend.
    pub(crate) fn with_backend(&self, kind: BackendKind, name: &str, plan: &BackendPlan) -> Self {
        let frames = Frames::of(kind, name, plan, &mut Interfaces::default());
        Self { own: Arc::clone(&self.own), frames }
    }

    /// Counts so far. Unknown counters are left out.
    pub(crate) fn counted(functions: &[Self]) -> Vec<Counts> {
        let mut read = Interfaces::default();
        functions.iter().map(|function| function.frames.counts(function.own.iter(), &mut read)).collect()
    }
}

impl Frames {
    /// Source of frame counters for a backend of this kind and name.
    fn of(kind: BackendKind, name: &str, plan: &BackendPlan, read: &mut Interfaces) -> Self {
        match (kind, plan) {
            (BackendKind::Tap | BackendKind::Switch, _) => Self::Own,
            (BackendKind::VhostNet, BackendPlan::Tap { .. }) => {
                let name = name.to_string();
                read.traffic(&name).map_or(Self::Unknown, |before| Self::Interface { name, before })
            }
            _ => Self::Unknown,
        }
    }

    /// Known counts, together with this program's `own`.
    fn counts(&self, own: impl Iterator<Item = (&'static str, u64)>, read: &mut Interfaces) -> Counts {
        let traffic = match self {
            Self::Own => return own.collect(),
            Self::Interface { name, before } => read.traffic(name).map(|now| now.since(*before)),
            Self::Unknown => None,
        };
        let control = own.filter(|(name, _)| OF_CONTROL.iter().any(|counter| counter.name() == *name));
        traffic.into_iter().flat_map(Traffic::counts).chain(control).collect()
    }
}

impl Traffic {
    /// Difference from `before`; saturates, because an interface that was removed and created again starts from 0.
    fn since(self, before: Self) -> Self {
        let Self { rx_frames, rx_bytes, tx_frames, tx_bytes } = self;
        Self {
            rx_frames: rx_frames.saturating_sub(before.rx_frames),
            rx_bytes: rx_bytes.saturating_sub(before.rx_bytes),
            tx_frames: tx_frames.saturating_sub(before.tx_frames),
            tx_bytes: tx_bytes.saturating_sub(before.tx_bytes),
        }
    }

    fn counts(self) -> [(&'static str, u64); 4] {
        [
            (Counter::RxFrames.name(), self.rx_frames),
            (Counter::RxBytes.name(), self.rx_bytes),
            (Counter::TxFrames.name(), self.tx_frames),
            (Counter::TxBytes.name(), self.tx_bytes),
        ]
    }
}

/// The interfaces of this process's network namespace, read on first use.
#[derive(Default)]
struct Interfaces(Option<HashMap<String, Traffic>>);

impl Interfaces {
    fn traffic(&mut self, name: &str) -> Option<Traffic> {
        let read = || parse(&fs::read_to_string("/proc/net/dev").unwrap_or_default());
        self.0.get_or_insert_with(read).get(name).copied()
    }
}

/// Parses `/proc/net/dev`: after two heading lines, one line for each interface, with its name, 8 numbers for received
/// traffic, bytes and packets first, and 8 for sent traffic. A tap receives what its guest sends.
fn parse(text: &str) -> HashMap<String, Traffic> {
    let line = |line: &str| {
        let (name, numbers) = line.rsplit_once(':')?;
        let numbers = numbers.split_whitespace().map(str::parse).collect::<Result<Vec<u64>, _>>().ok()?;
        let [tx_bytes, tx_frames, _, _, _, _, _, _, rx_bytes, rx_frames, ..] = numbers[..] else { return None };
        Some((name.trim().to_string(), Traffic { rx_frames, rx_bytes, tx_frames, tx_bytes }))
    };
    text.lines().skip(2).filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEV: &str = "\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast\
|bytes    packets errs drop fifo colls carrier compressed
    lo:     100       1    0    0    0     0          0         0 \
     100       1    0    0    0     0       0          0
  pf0v3: 71400     134    0    2    0     0          0         0 \
 3200000    2750    0    0    0     0       0          0
";

    #[test]
    fn a_tap_receives_the_frames_that_its_guest_sends() {
        let interfaces = parse(DEV);
        let traffic = Traffic { rx_frames: 2750, rx_bytes: 3_200_000, tx_frames: 134, tx_bytes: 71_400 };
        assert_eq!(interfaces.get("pf0v3"), Some(&traffic));
        assert_eq!(interfaces.len(), 2);
        assert_eq!(parse("").len() + parse("a\nb\nnonsense\nx: 1 2\n").len(), 0);
        assert!(Interfaces::default().traffic("lo").is_some());
        assert_eq!(Interfaces::default().traffic("no such interface"), None);
    }

    #[test]
    fn frames_are_counted_by_who_carries_them_or_not_told() {
        let mut read = Interfaces(Some(parse(DEV)));
        let mut counts =
            |frames: Frames| frames.counts(Counter::ALL.iter().map(|counter| (counter.name(), 7)), &mut read);
        assert_eq!(counts(Frames::Own).len(), Counter::COUNT);
        let control = [("control_commands", 7), ("control_refused", 7), ("broken_rings", 7)];
        assert_eq!(counts(Frames::Unknown), control);
        let gone = Frames::Interface { name: "gone".to_string(), before: Traffic::default() };
        assert_eq!(counts(gone), control);
        let before = Traffic { rx_frames: 2749, rx_bytes: 3_199_940, tx_frames: 200, tx_bytes: 0 };
        let counts = counts(Frames::Interface { name: "pf0v3".to_string(), before });
        let traffic = [("rx_frames", 1), ("rx_bytes", 60), ("tx_frames", 0), ("tx_bytes", 71_400)];
        assert_eq!((&counts[..4], &counts[4..]), (&traffic[..], &control[..]));
    }
}
