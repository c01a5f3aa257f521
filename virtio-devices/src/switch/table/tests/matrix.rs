//! Reachability between ports.

use super::*;

/// A kind of frame.
#[derive(Debug, Clone, Copy)]
enum To {
    /// For this port.
    Port(PortIndex),
    /// For an address that no port has.
    Unknown,
    Broadcast,
    /// For a group that the first VF has joined.
    Joined,
    /// For a group that no port has joined.
    NotJoined,
}

impl To {
    const ALL: [Self; 8] = [
        Self::Port(PF),
        Self::Port(VF[0]),
        Self::Port(VF[1]),
        Self::Port(VF[2]),
        Self::Unknown,
        Self::Broadcast,
        Self::Joined,
        Self::NotJoined,
    ];

    fn mac(self) -> Mac {
        match self {
            Self::Port(port) => mac(port),
            Self::Unknown => [0x52, 0x54, 0, 0, 2, 0],
            Self::Broadcast => BROADCAST,
            Self::Joined => GROUP,
            Self::NotJoined => [0x33, 0x33, 0, 0, 0, 6],
        }
    }
}

/// Uplink, PF, and three VFs, with changes: the first VF has joined a group, the second is trusted and promiscuous, and
/// the third requests the same without trust.
fn switch(mode: SwitchMode, change: impl FnOnce(&mut [PortSpec<'_>; 5])) -> Table {
    let (trusted, untrusted) = (Policy::default(), Policy { trusted: false, ..Policy::default() });
    let groups = [GROUP];
    let vf = |at: usize, policy| spec(Role::Vf, VF[at], policy);
    let mut ports = [
        PortSpec::uplink(true),
        spec(Role::Pf, PF, &trusted),
        PortSpec { multicast: &groups, ..vf(0, &untrusted) },
        PortSpec { all_unicast: true, all_multicast: true, ..vf(1, &trusted) },
        PortSpec { all_unicast: true, all_multicast: true, ..vf(2, &untrusted) },
    ];
    change(&mut ports);
    Table::new(mode, &ports, None)
}

fn result(table: &Table, from: PortIndex, source: Mac, to: To) -> String {
    match route(table, from, &head(source, to.mac(), &[])) {
        Ok(ports) => ports.iter().map(PortIndex::to_string).collect::<Vec<_>>().join(" "),
        Err(Miss::OwnAddress) => "own".to_string(),
        Err(Miss::Unknown) => "unknown".to_string(),
        Err(Miss::Isolated) => "isolated".to_string(),
        Err(Miss::Closed(port)) => format!("closed {port}"),
    }
}

/// A row for each kind of frame, with the destinations from each port.
type Matrix = [[&'static str; 5]; 8];

fn check(table: &Table, expected: &Matrix) {
    for (to, row) in To::ALL.into_iter().zip(expected) {
        for (from, expected) in (0..).zip(row) {
            let source = if from == UPLINK { FAR } else { mac(from) };
            assert_eq!(result(table, from, source, to), *expected, "{to:?} from {from}");
        }
    }
}

const VEB: Matrix = [
    ["1", "own", "1", "1", "1"],
    ["2", "2", "own", "2", "2"],
    ["3", "3", "3", "own", "3"],
    ["4", "4", "4", "4", "own"],
    ["3", "0 3", "0 3", "0", "0 3"],
    ["1 2 3 4", "0 2 3 4", "0 1 3 4", "0 1 2 4", "0 1 2 3"],
    ["2 3", "0 2 3", "0 3", "0 2", "0 2 3"],
    ["3", "0 3", "0 3", "0", "0 3"],
];

#[test]
fn veb_forwards_known_frames_and_floods_to_uplink_and_trusted() {
    check(&switch(SwitchMode::Veb, |_| ()), &VEB);
}

#[test]
fn isolated_function_exchanges_frames_only_with_uplink_and_pf() {
    let table = switch(SwitchMode::Veb, |ports| ports[2].isolated = true);
    let expected = [
        ["1", "own", "1", "1", "1"],
        ["2", "2", "own", "isolated", "isolated"],
        ["3", "3", "isolated", "own", "3"],
        ["4", "4", "isolated", "4", "own"],
        ["3", "0 3", "0", "0", "0 3"],
        ["1 2 3 4", "0 2 3 4", "0 1", "0 1 4", "0 1 3"],
        ["2 3", "0 2 3", "0", "0", "0 3"],
        ["3", "0 3", "0", "0", "0 3"],
    ];
    check(&table, &expected);
}

#[test]
fn a_closed_port_gets_nothing_and_keeps_its_address() {
    let table = switch(SwitchMode::Veb, |ports| {
        ports[2].open = false;
        ports[3].open = false;
    });
    let expected = [
        ["1", "own", "1", "1", "1"],
        ["closed 2", "closed 2", "own", "closed 2", "closed 2"],
        ["closed 3", "closed 3", "closed 3", "own", "closed 3"],
        ["4", "4", "4", "4", "own"],
        ["unknown", "0", "0", "0", "0"],
        ["1 4", "0 4", "0 1 4", "0 1 4", "0 1"],
        ["", "0", "0", "0", "0"],
        ["", "0", "0", "0", "0"],
    ];
    check(&table, &expected);
}

#[test]
fn with_its_uplink_down_a_bridge_still_connects_its_functions() {
    let mut expected = VEB.map(|row| row.map(|ports| ports.trim_start_matches("0 ")));
    expected[4] = ["3", "3", "3", "unknown", "3"];
    expected[7] = ["3", "3", "3", "", "3"];
    check(&switch(SwitchMode::Veb, |ports| ports[0].open = false), &expected);
}

#[test]
fn a_closed_switch_needs_no_uplink() {
    let (trusted, spoofed) = (Policy::default(), [9; 6]);
    let ports = [spec(Role::Pf, 0, &trusted), spec(Role::Vf, 1, &trusted), spec(Role::Vf, 2, &trusted)];
    let table = Table::new(SwitchMode::Veb, &ports, None);
    assert_eq!(route(&table, 1, &head(mac(1), mac(2), &[])), Ok(vec![2]));
    assert_eq!(route(&table, 1, &head(spoofed, BROADCAST, &[])), Ok(vec![0, 2]));
    assert_eq!(route(&table, 1, &head(mac(1), FAR, &[])), Err(Miss::Unknown));
    assert_eq!(route(&table, 3, &head(mac(1), mac(2), &[])), Err(Miss::Unknown), "no such port");
    assert_eq!(route(&Table::new(SwitchMode::Vepa, &ports, None), 1, &head(mac(1), mac(2), &[])), Err(Miss::Unknown));
}

#[test]
fn an_aggregator_leaves_all_to_the_switch_behind_its_uplink() {
    let table = switch(SwitchMode::Vepa, |_| ());
    let expected = VEB.map(|[uplink, ..]| [uplink, "0", "0", "0", "0"]);
    check(&table, &expected);
    let closed = switch(SwitchMode::Vepa, |ports| ports[0].open = false);
    assert_eq!(result(&closed, PF, mac(PF), To::Port(VF[0])), "closed 0");
}

#[test]
fn a_reflection_goes_where_it_should_but_not_back_to_its_sender() {
    let reflected = |table: &Table, source, to| result(table, UPLINK, mac(source), to);
    let table = switch(SwitchMode::Vepa, |_| ());
    for (source, broadcast, joined, unknown) in [
        (PF, "2 3 4", "2 3", "3"),
        (VF[0], "1 3 4", "3", "3"),
        (VF[1], "1 2 4", "2", "unknown"),
        (VF[2], "1 2 3", "2 3", "3"),
    ] {
        assert_eq!(reflected(&table, source, To::Broadcast), broadcast);
        assert_eq!(reflected(&table, source, To::Joined), joined);
        assert_eq!(reflected(&table, source, To::Unknown), unknown);
        assert_eq!(reflected(&table, source, To::Port(source)), "own");
        for to in [PF, VF[0], VF[1], VF[2]].into_iter().filter(|to| *to != source) {
            assert_eq!(reflected(&table, source, To::Port(to)), to.to_string());
        }
    }
    let isolated = switch(SwitchMode::Vepa, |ports| ports[2].isolated = true);
    assert_eq!(reflected(&isolated, VF[0], To::Broadcast), "1");
    assert_eq!(reflected(&isolated, VF[0], To::Port(VF[1])), "isolated");
    assert_eq!(reflected(&isolated, VF[1], To::Port(VF[0])), "isolated");
    assert_eq!(reflected(&isolated, PF, To::Port(VF[0])), "2");
    // A bridge behind the uplink that knows its port reflects nothing: there the source is another device with this
    // address.
    assert_eq!(reflected(&switch(SwitchMode::Veb, |_| ()), PF, To::Broadcast), "1 2 3 4");
}

#[test]
fn groups_of_bridges_go_to_the_uplink_or_from_it_to_the_pf() {
    const LLDP: Mac = [0x01, 0x80, 0xc2, 0, 0, 0x0e];
    let groups = [LLDP];
    let table = |mode, pf_wants: bool| {
        let trusted = Policy::default();
        let groups = if pf_wants { &groups[..] } else { &[] };
        let ports = [
            PortSpec::uplink(true),
            PortSpec { multicast: groups, ..spec(Role::Pf, PF, &trusted) },
            PortSpec { multicast: &[LLDP], ..spec(Role::Vf, VF[0], &trusted) },
            PortSpec { all_multicast: true, ..spec(Role::Vf, VF[1], &trusted) },
        ];
        Table::new(mode, &ports, None)
    };
    for mode in [SwitchMode::Veb, SwitchMode::Vepa] {
        let to = |table: &Table, from, source| route(table, from, &head(source, LLDP, &[]));
        for from in [PF, VF[0], VF[1]] {
            assert_eq!(to(&table(mode, true), from, mac(from)), Ok(vec![UPLINK]));
        }
        assert_eq!(to(&table(mode, true), UPLINK, FAR), Ok(vec![PF]));
        assert_eq!(to(&table(mode, false), UPLINK, FAR), Ok(vec![]));
    }
}

#[test]
fn a_mirror_gets_what_its_port_sends_whatever_the_destination() {
    let table = switch(SwitchMode::Veb, |ports| {
        ports[2].mirror = Some(PF);
        ports[3].mirror = Some(VF[1]);
        ports[4].mirror = Some(VF[0]);
        ports[2].open = false;
    });
    let copy = |from, to| table.mirror(from, &head(mac(from), to, &[]));
    assert_eq!([copy(VF[0], mac(VF[1])), copy(VF[0], FAR)], [Some(PF); 2]);
    assert_eq!((copy(VF[1], FAR), copy(VF[2], FAR), copy(PF, FAR)), (None, None, None), "itself, closed, none");
}
