//! Command lines and JSON: any user input is either parsed or refused in one line.
//!
//! Anything parsed prints as text that parses back to the same value, and likewise as JSON. A plan uses no id, tap or
//! slot twice, and a device no MAC address.

use std::collections::HashSet;
use std::fmt::{Debug, Display};
use std::str::FromStr;

use serde::Serialize;
use serde::de::DeserializeOwned;
use vmm::config::{
    BackendPlan, ConsoleConfig, CpusConfig, MemoryConfig, NetConfig, NetVf, Options, VfConfig, VmConfig, VmPlan,
};

use crate::input::{Input, Seed};

// The kinds of text.
const NET: u8 = 0;
const NET_VF: u8 = 1;
const CPUS: u8 = 2;
const MEMORY: u8 = 3;
const CONSOLE: u8 = 4;
const JSON: u8 = 5;
const COMMAND_LINE: u8 = 6;
const KINDS: u8 = 7;

/// Checks that an error is one line that a terminal can show.
fn check_report(error: &impl Display) {
    let text = error.to_string();
    assert!(!text.is_empty() && !text.contains(char::is_control), "{text:?}");
}

/// Parses a text, and then its printed form and its JSON.
fn read<T>(text: &str) -> Option<T>
where
    T: FromStr<Err: Display> + Display + Serialize + DeserializeOwned + PartialEq + Debug,
{
    let read: T = text.parse().inspect_err(check_report).ok()?;
    let printed = read.to_string();
    match printed.parse::<T>() {
        Ok(again) => assert_eq!(again, read, "{printed:?}"),
        Err(error) => panic!("{text:?} is parsed, but its printed form {printed:?} is not: {error}"),
    }
    check_json(&read);
    Some(read)
}

fn check_json<T: Serialize + DeserializeOwned + PartialEq + Debug>(value: &T) {
    let json = serde_json::to_string(value).expect("a configuration is JSON");
    match serde_json::from_str::<T>(&json) {
        Ok(again) => assert_eq!(again, *value, "{json}"),
        Err(error) => panic!("{value:?} does not parse back from JSON: {error}"),
    }
}

fn read_vf(text: &str) -> Option<NetVf> {
    let read: NetVf = text.parse().inspect_err(check_report).ok()?;
    let vf: &VfConfig = &read.vf;
    // A VF does not print its PF's name, so prepend one that needs no quotes.
    let printed: NetVf = format!("pf=pf0,{vf}").parse().unwrap_or_else(|error| panic!("{vf} is not parsed: {error}"));
    assert_eq!(printed.vf, *vf);
    check_json(vf);
    Some(read)
}

/// Plans a configuration. Every plan must be buildable.
fn plan(config: &VmConfig) -> Option<usize> {
    let plan = VmPlan::of(config).inspect_err(check_report).ok()?;
    let functions: Vec<_> = plan.nets().flat_map(|plan| std::iter::once(&plan.pf).chain(&plan.vfs)).collect();
    let distinct = |count: usize, what: &str| assert_eq!(count, functions.len(), "{what} is used twice");
    // Devices may share an address, functions of one device may not.
    for net in plan.nets() {
        let macs: HashSet<_> = std::iter::once(&net.pf).chain(&net.vfs).map(|nic| nic.spec.mac).collect();
        assert_eq!(macs.len(), 1 + net.vfs.len(), "an address is used twice");
    }
    distinct(functions.iter().map(|nic| &nic.spec.id).collect::<HashSet<_>>().len(), "an id");
    let taps: Vec<_> = functions
        .iter()
        .filter_map(|nic| match &nic.backend {
            BackendPlan::Tap { spec, .. } => spec.name.as_ref(),
            _ => None,
        })
        .collect();
    assert_eq!(taps.iter().collect::<HashSet<_>>().len(), taps.len(), "a tap is used twice");
    let slots: Vec<_> = plan.devices.iter().filter_map(|device| device.pci_device_id).collect();
    assert_eq!(slots.iter().collect::<HashSet<_>>().len(), slots.len(), "a slot is used twice");
    for nic in &functions {
        assert!(nic.spec.mac[0] & 1 == 0 && nic.spec.mac != [0; 6], "{:x?} is no address of a NIC", nic.spec.mac);
        assert!(nic.spec.queue_pairs > 0 && nic.spec.queue_size.is_power_of_two(), "{nic:?}");
    }
    Some(functions.len())
}

/// The options of a command line, one per line: `net id=pf0` stands for `--net id=pf0`.
fn command_line(text: &str) -> Option<VmConfig> {
    let mut config = VmConfig::default();
    config.payload.kernel = Some("vmlinux".into());
    let mut vfs: Vec<NetVf> = Vec::new();
    // A VM has 31 slots, so longer lists of options show nothing new.
    for line in text.lines().take(40) {
        let (option, value) = line.split_once(' ').unwrap_or((line, ""));
        match option {
            "net" => config.net.push(read(value)?),
            "net-vf" => vfs.push(read_vf(value)?),
            "cpus" => config.cpus = read(value)?,
            "memory" => config.memory = read(value)?,
            "serial" => config.serial = read(value)?,
            "console" => config.console = read(value)?,
            "platform" => config.platform = Some(read(value)?),
            "cmdline" => config.payload.cmdline = Some(value.into()),
            _ => return None,
        }
    }
    let ids = config.ids().of::<NetConfig>();
    for vf in vfs {
        vf.add_to(&mut config.net, &ids).inspect_err(check_report).ok()?;
    }
    Some(config)
}

/// Parses an input.
pub fn run(input: &[u8]) {
    run_to_end(input);
}

/// As [`run`]. Returns true if the input was parsed, and the number of planned functions.
fn run_to_end(input: &[u8]) -> (bool, usize) {
    let mut input = Input::new(input);
    let kind = input.u8() % KINDS;
    let text = String::from_utf8_lossy(input.slice(usize::MAX));
    let config = match kind {
        NET => return (read::<NetConfig>(&text).is_some(), 0),
        NET_VF => return (read_vf(&text).is_some(), 0),
        CPUS => return (read::<CpusConfig>(&text).is_some(), 0),
        MEMORY => return (read::<MemoryConfig>(&text).is_some(), 0),
        CONSOLE => return (read::<ConsoleConfig>(&text).is_some(), 0),
        JSON => serde_json::from_str::<VmConfig>(&text).ok().inspect(check_json),
        _ => command_line(&text),
    };
    let Some(config) = config else { return (false, 0) };
    (true, plan(&config).unwrap_or(0))
}

/// An option with all of its keys, each with a value that suits its syntax.
fn every_key<T: Options>() -> String {
    let value = |syntax: &str| match syntax {
        "<number>" | "<number>|<first>-<last>|*" | "<ms>" | "<id>" | "<priority>" => "2",
        "<Mbit/s>" => "100",
        "802.1q|802.1ad" => "802.1ad",
        "[<id>,<id>-<id>,...]" => "[7,10-19]",
        "[vlan:<id>-<id>,mac,max_tx_rate:<Mbit/s>,link,spoofchk]" => "[vlan:7,vlan:10-19,mac,max_tx_rate:9]",
        "auto|up|down" => "up",
        "<bytes>" => "1500",
        "<bytes>[K|M|G]" => "1G",
        "<address>" | "<address>|any" | "<mask>" => "192.168.249.1",
        "[<fd>,...]" => "[3,5-6]",
        "on|off" => "on",
        "on|off|auto" => "auto",
        "client|server" => "server",
        "veb|vepa" => "veb",
        "virtio|x550|x540" => "x540",
        "off|pf|<VF>" => "pf",
        "<threads>:<cores>:<dies>:<packages>" => "1:2:1:1",
        "[<vcpu>@[<cpu>,<cpu>-<cpu>,...],...]" => "[0@[1,3-4]]",
        "amx" => "amx",
        "acpi" | "acpi|virtio-mem" => "acpi",
        "vm|vcpu|off" => "vcpu",
        _ => "\"a,b\"",
    };
    let keys = T::keys().into_iter().map(|key| format!("{}={}", key.name, value(key.syntax)));
    keys.collect::<Vec<_>>().join(",").replace("mac=192.168.249.1", "mac=52:54:00:00:00:01")
}

/// Seeds: every key of every option, machines with VFs as a command line and as JSON, and quotes and brackets.
pub fn seeds() -> Vec<Vec<u8>> {
    let seed = |kind: u8, text: &str| Seed::new().with([kind]).with(text).done();
    let json = r#"{"cpus":{"boot_vcpus":4},"memory":{"size":1073741824,"shared":true,"hugepages":true,
        "hugepage_size":2097152},"payload":{"kernel":"k","cmdline":"console=ttyS0"},"net":[{"id":"pf0","tap":"t",
        "mac":"52:54:00:00:00:01","fds":null,"sriov_vfs":8,"vfs":[{"index":3,"tap":"u","num_queues":4},{"index":0,
        "fds":[3,4],"num_queues":4}]},{"rate_limiter_config":{"bandwidth":{"size":1,"refill_time":2}}}],
        "serial":{"mode":"File","file":"/tmp/x"},"console":{"mode":"Off"}}"#;
    let machine = "cpus boot=4\nmemory size=512M\nnet id=pf0,tap=pf0,mac=52:54:00:00:00:01,sriov_vfs=8,num_queues=4\n\
        net-vf pf=pf0,index=0,tap=tenant-a,mac=52:54:00:00:01:00\nnet-vf pf=pf0,index=7,queue_size=64\n\
        net tap=other,pci_device_id=5\nserial tty\nconsole off\ncmdline console=ttyS0\n\
        platform uuid=00112233-4455-6677-8899-aabbccddeeff,oem_strings=[a,\"b,c\"],chassis_asset_tag=x";
    vec![
        seed(NET, &every_key::<NetConfig>()),
        seed(NET_VF, &every_key::<NetVf>()),
        seed(CPUS, &every_key::<CpusConfig>()),
        seed(MEMORY, &every_key::<MemoryConfig>()),
        seed(CONSOLE, "file=\"/tmp/a, \"\"b\"\"\""),
        seed(CONSOLE, "tty"),
        seed(CONSOLE, "tty,iommu=on\u{1f}"),
        seed(JSON, json),
        seed(COMMAND_LINE, machine),
        seed(COMMAND_LINE, "net sriov_vfs=300\nnet sriov_vfs=256,id=x\nnet fd=[3]\nnet"),
        seed(NET, "tap=\"a]\",id=\" b\",fd=[3,\"4\"],socket=[x,y]"),
        seed(NET, "ip=fe80::1,mask=ffff::,mtu=,offload_tso=False,,"),
        seed(MEMORY, "size=17179869183G,thp=off"),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_read_and_planned() {
        let done: Vec<_> = seeds().iter().map(|seed| run_to_end(seed)).collect();
        let (read, not_read) = ((true, 0), (false, 0));
        let planned = [(true, 10), (true, 10), (true, 560)];
        assert_eq!(done, [&[read; 6][..], &[not_read], &planned, &[read; 3]].concat());
    }
}
