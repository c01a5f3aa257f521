//! The decision as a table, and the rules for the key.

use proptest::prelude::*;
use vm_api::config::net::VfConfig;

use super::*;
use crate::config::net::policy::info_of;
use crate::config::{VmConfig, VmPlan};

const ALL: &str = "[vlan:100-199,vlan:300,mac,max_tx_rate:1000,link,spoofchk]";
const PF: &str = "id=pf0,sriov_vfs=2,mac=52:54:00:00:00:01";
const ON_SWITCH: &str = "id=pf0,sriov_vfs=2,mac=52:54:00:00:00:01,switch=veb,tap=t,uplink_rate=1000";
const TAKEN: MacAddress = MacAddress([0x52, 0x54, 0, 0, 0, 9]);

/// A host's PF and VF.
struct Host {
    pf: NetConfig,
    vf: NetConfig,
    link: LinkPolicy,
    backend: BackendKind,
}

impl Host {
    fn new(pf: &str, vf: &str) -> Self {
        let pf: NetConfig = pf.parse().unwrap();
        let own: VfConfig =
            if vf.is_empty() { "index=0".to_string() } else { format!("index=0,{vf}") }.parse().unwrap();
        let vf = own.over(&pf, 2);
        let backend = if vf.switch.is_some() { BackendKind::Switch } else { BackendKind::Tap };
        Self { link: vf.policy.link.unwrap_or_default(), pf, vf, backend }
    }

    fn view(&self) -> HostVf<'_> {
        HostVf { config: &self.vf, link: self.link, backend: self.backend, pf: &self.pf }
    }
}

fn set(json: &str) -> Set {
    serde_json::from_str(&format!(r#"{{"vf":"0000:00:03.1",{json}}}"#)).unwrap()
}

/// The refusal of a guest's request, or "" for none.
fn answer(allowed: &str, host: &Host, request: &str) -> String {
    let allowed = if allowed.is_empty() { GuestControl::default() } else { allowed.parse().unwrap() };
    let wanted = requested(&GuestSettings::default(), &set(request));
    match decide(&allowed, host.view(), &wanted, |mac| mac == TAKEN) {
        Ok(_) => String::new(),
        Err(Denial { refusal: Refusal { code, message }, .. }) => format!("{code:?} {message}"),
    }
}

/// Each key: not allowed; within the limits; beyond them; what the host has set before; and after, when it is decided
/// again and ends.
#[test]
fn each_key_is_decided_by_its_limits_and_the_hosts_settings() {
    let not = "the host does not let the guest set it";
    for (key, within, text, beyond, hosts) in [
        (
            "vlan",
            r#""vlan":120,"vlan_qos":3"#,
            "120",
            vec![
                (r#""vlan":200"#, "Denied vlan=200: the host allows 100-199, 300"),
                (r#""vlan":4095"#, "Invalid vlan=4095: not a VLAN; give 1 to 4094, or 0 for the host's"),
                (r#""vlan":300,"vlan_qos":8"#, "Invalid vlan_qos=8: not a priority; give 0 to 7"),
                (r#""vlan_qos":1"#, "Invalid vlan_qos=1: goes only with a vlan that the guest sets; add vlan"),
                (
                    r#""vlan":0,"vlan_proto":"802.1ad""#,
                    "Invalid vlan_proto=802.1ad: goes only with a vlan that the guest sets; add vlan",
                ),
            ],
            vec![("vlan=7", "the host has set vlan=7"), ("trunk=[0,7]", "the host has set trunk=[0,7]")],
        ),
        (
            "mac",
            r#""mac":"52:54:00:00:00:07""#,
            "52:54:00:00:00:07",
            vec![
                (
                    r#""mac":"52:54:00:00:00:09""#,
                    "Conflict mac=52:54:00:00:00:09: another function has this address; give another",
                ),
                (
                    r#""mac":"01:00:5e:00:00:01""#,
                    "Invalid mac=01:00:5e:00:00:01: not the address of a NIC; give one with an even first byte, such \
                     as 52:54:00:12:34:56",
                ),
                (
                    r#""mac":"00:00:00:00:00:00""#,
                    "Invalid mac=00:00:00:00:00:00: not the address of a NIC; give one with an even first byte, such \
                     as 52:54:00:12:34:56",
                ),
            ],
            vec![("mac=52:54:00:00:00:08", "the host has set mac=52:54:00:00:00:08")],
        ),
        (
            "max_tx_rate",
            r#""max_tx_rate":1000"#,
            "1000",
            vec![(r#""max_tx_rate":1001"#, "Denied max_tx_rate=1001: the host allows up to 1000")],
            vec![("max_tx_rate=999", "the host has set max_tx_rate=999")],
        ),
        ("link", r#""link":"up""#, "up", vec![], vec![("link=down", "the host has set link=down")]),
        ("spoofchk", r#""spoofchk":false"#, "off", vec![], vec![("spoofchk=on", "the host has set spoofchk=on")]),
    ] {
        for pf in [PF, ON_SWITCH] {
            let unset = Host::new(pf, "");
            assert_eq!(answer("", &unset, within), format!("Denied {key}={text}: {not}"), "without guest_control");
            assert_eq!(answer(ALL, &unset, within), "", "{key} within the limits");
            for (request, expected) in &beyond {
                assert_eq!(answer(ALL, &unset, request), *expected);
            }
            for (given, what) in &hosts {
                let host = Host::new(pf, given);
                let wanted = requested(&GuestSettings::default(), &set(within));
                // Set by the host before the guest asks, and after it.
                assert_eq!(answer(ALL, &host, within), format!("Denied {key}={text}: {what}"), "{given}");
                let (remaining, config, ended) =
                    decide_again(&ALL.parse().unwrap(), host.view(), &wanted, |mac| mac == TAKEN);
                assert_eq!((remaining, ended), (GuestSettings::default(), vec![key]), "{given}");
                assert_eq!((info_of(&config), config.mac), (info_of(&host.vf), host.vf.mac), "the host's again");
            }
        }
    }
}

/// A trunk of the host's is a ceiling for port VLANs of the guest, one of which takes its place.
#[test]
fn a_vlan_within_the_hosts_trunk_is_the_guests() {
    let host = Host::new(PF, "trunk=[0,100-150]");
    assert_eq!(answer(ALL, &host, r#""vlan":150"#), "");
    assert_eq!(answer(ALL, &host, r#""vlan":151"#), "Denied vlan=151: the host has set trunk=[0,100-150]");
    let wanted = requested(&GuestSettings::default(), &set(r#""vlan":150"#));
    let config = decide(&ALL.parse().unwrap(), host.view(), &wanted, |_| false).unwrap();
    let info = info_of(&config);
    assert_eq!((info.vlan, info.trunk.0.len()), (150, 0));
    // Without it, the trunk applies again.
    let config = effective(&host.vf, LinkPolicy::Auto, &GuestSettings::default());
    assert_eq!(info_of(&config).trunk, info_of(&host.vf).trunk);
    assert_eq!(info_of(&host.vf).trunk.0.len(), 2);
}

#[test]
fn each_key_needs_its_own_right() {
    let host = Host::new(PF, "");
    let keys = [
        ("vlan", r#""vlan":120"#),
        ("mac", r#""mac":"52:54:00:00:00:07""#),
        ("max_tx_rate", r#""max_tx_rate":10"#),
        ("link", r#""link":"down""#),
        ("spoofchk", r#""spoofchk":true"#),
    ];
    for (right, _) in keys {
        for (key, request) in keys {
            let refused = answer(&format!("[{right}]"), &host, request);
            assert_eq!(refused.is_empty(), right == key, "{key} with the right to set {right}: {refused}");
        }
    }
}

#[test]
fn the_guests_values_are_effective_and_the_hosts_return() {
    let host = Host::new(ON_SWITCH, "max_tx_rate=900,trust=off,weight=5");
    let request =
        r#""vlan":300,"vlan_qos":2,"mac":"52:54:00:00:00:07","max_tx_rate":500,"link":"down","spoofchk":false"#;
    let wanted = requested(&GuestSettings::default(), &set(request));
    let config = decide(&ALL.parse().unwrap(), host.view(), &wanted, |_| false).unwrap();
    let info = info_of(&config);
    assert_eq!((info.vlan, info.vlan_qos, info.max_tx_rate, info.link), (300, 2, 500, LinkPolicy::Down));
    assert_eq!((info.spoofchk, info.trust, info.weight), (false, false, Some(5)), "only what it may");
    assert!(info_of(&host.vf).spoofchk, "a switch's default");
    // 0 ends its own VLAN with its priority, and its own limit.
    let ended = requested(&wanted, &set(r#""vlan":0,"max_tx_rate":0"#));
    assert_eq!(ended.keys(), ["mac", "link", "spoofchk"]);
    let info = info_of(&decide(&ALL.parse().unwrap(), host.view(), &ended, |_| false).unwrap());
    assert_eq!((info.vlan, info.vlan_qos, info.max_tx_rate), (0, 0, 900));
    // A plugin for containers sends the defaults along.
    let defaults = requested(&GuestSettings::default(), &set(r#""vlan":0,"vlan_qos":0,"vlan_proto":"802.1q""#));
    assert!(defaults.is_empty());
}

#[test]
fn the_guests_spoof_check_takes_trust_away_and_never_gives_it() {
    let allowed: GuestControl = "[spoofchk]".parse().unwrap();
    let trust = |vf: &str, on: bool| {
        let wanted = GuestSettings { spoofchk: Some(on), ..GuestSettings::default() };
        info_of(&decide(&allowed, Host::new(PF, vf).view(), &wanted, |_| false).unwrap()).trust
    };
    assert_eq!([trust("", true), trust("", false), trust("trust=off", false)], [false, true, false]);
}

#[test]
fn an_open_backend_refuses_to_the_guest_as_it_does_to_the_host() {
    let carried = "carries this function's packets past this program; leave vhost out, or set it on the host \
                   (docs/policy.md)";
    let open = Host { backend: BackendKind::VhostNet, ..Host::new(PF, "vhost=auto") };
    for host in [&open, &Host::new(PF, "vhost=on")] {
        assert_eq!(answer(ALL, host, r#""vlan":120"#), format!("Conflict vlan=120: vhost-net {carried}"));
        let spoofchk = answer(ALL, host, r#""spoofchk":true,"link":"down""#);
        assert_eq!(spoofchk, format!("Conflict spoofchk=on: vhost-net {carried}"));
        assert_eq!(answer(ALL, host, r#""link":"down","mac":"52:54:00:00:00:07""#), "");
    }
    let vdpa = Host { backend: BackendKind::Vdpa, ..Host::new(PF, "vdpa=/d") };
    let what = "Conflict mac=52:54:00:00:00:07: a VF on a vDPA device has that device's address; leave mac out";
    assert_eq!(answer(ALL, &vdpa, r#""mac":"52:54:00:00:00:07""#), what);
    let guaranteed = Host::new(ON_SWITCH, "min_tx_rate=100");
    let what = "Conflict min_tx_rate=100: more than max_tx_rate=99; give no more than that, or raise max_tx_rate";
    assert_eq!(answer(ALL, &guaranteed, r#""max_tx_rate":99"#), what);
}

#[test]
fn the_key_is_for_pfs_of_virtio_alone() {
    let plan = |net: &str| {
        let config = VmConfig { net: vec![net.parse().unwrap()], ..VmConfig::default() };
        VmPlan::of(&config).map(|_| ()).map_err(|error| error.to_string())
    };
    assert_eq!(plan("sriov_vfs=1,guest_control=[mac]"), Ok(()));
    let subject = "--net id=n,guest_control=[vlan:5,mac]";
    let none = format!("{subject}: is for the VFs of a PF, and there are none; add sriov_vfs=");
    assert_eq!(plan("id=n,guest_control=[vlan:5,mac]"), Err(none));
    let owner = format!(
        "{subject}: the guest owns the VFs of an X550 and configures them (ip link set <PF> vf); leave guest_control \
         out, or give model=virtio"
    );
    assert_eq!(plan("id=n,model=x550,tap=t,sriov_vfs=1,guest_control=[vlan:5,mac]"), Err(owner));
    let empty = "sriov_vfs=1,guest_control=[]".parse::<NetConfig>().unwrap_err().to_string();
    assert!(empty.starts_with("--net guest_control=[]: the list is empty"), "{empty}");
}

fn settings() -> impl Strategy<Value = GuestSettings> {
    use prop::option::of;
    let link = prop_oneof![Just(LinkPolicy::Auto), Just(LinkPolicy::Up), Just(LinkPolicy::Down)];
    let proto = prop_oneof![Just(VlanProto::Customer), Just(VlanProto::Service)];
    let mac = any::<[u8; 6]>().prop_map(MacAddress);
    let vlan = (of(0..5000u16), of(0..10u8), of(proto));
    (vlan, of(mac), of(0..2000u32), of(link), of(any::<bool>())).prop_map(
        |((vlan, vlan_qos, vlan_proto), mac, max_tx_rate, link, spoofchk)| GuestSettings {
            vlan,
            vlan_qos,
            vlan_proto,
            mac,
            max_tx_rate,
            link,
            spoofchk,
        },
    )
}

proptest! {
    /// For any saved state or request, the host's ceilings hold, and all that remains is allowed.
    #[test]
    fn no_settings_loosen_what_the_host_has_set(
        wanted in settings(),
        host in prop::sample::select(vec!["", "vlan=7", "trunk=[7]", "spoofchk=on", "link=down", "max_tx_rate=99"]),
        rights in prop::sample::select(vec![ALL, "[vlan]", "[mac]", "[max_tx_rate]", "[link,spoofchk]"]),
        pf in prop::sample::select(vec![PF, ON_SWITCH]),
    ) {
        let (host, allowed) = (Host::new(pf, host), rights.parse::<GuestControl>().unwrap());
        let (remaining, config, ended) = decide_again(&allowed, host.view(), &wanted, |mac| mac == TAKEN);
        prop_assert_eq!(remaining == wanted, ended.is_empty());
        prop_assert!(decide(&allowed, host.view(), &remaining, |mac| mac == TAKEN).is_ok());
        let (now, of_host) = (info_of(&config), info_of(&host.vf));
        prop_assert!(of_host.vlan == 0 || now.vlan == of_host.vlan);
        prop_assert!(now.vlan == of_host.vlan || allowed.vlans.iter().any(|range| range.contains(&now.vlan)));
        prop_assert!(of_host.max_tx_rate == 0 || (1..=of_host.max_tx_rate).contains(&now.max_tx_rate));
        prop_assert!(host.vf.policy.spoofchk != Some(true) || now.spoofchk);
        prop_assert!(of_host.link != LinkPolicy::Down || now.link == LinkPolicy::Down);
        prop_assert!(of_host.trust || !now.trust);
        prop_assert_eq!((now.trunk, now.isolated, now.mirror), (of_host.trunk, of_host.isolated, of_host.mirror));
    }
}
