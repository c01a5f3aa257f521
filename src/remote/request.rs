//! From a command to a call of the API.

use std::io::Read as _;
use std::mem::take;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use serde::Serialize;
use vm_api::body::{InjectFault, RemoveDevice, Resize, ResizeDisk, ResizeZone};
use vm_api::config::{RestoreConfig, RestoredBackend, RestoredNet};
use vm_api::migration::{ReceiveMigration, ResumeOptions, SendMigration};

use super::client::Call;
use super::command::Command;
use super::descriptor::duplicate;

type Error = Box<dyn std::error::Error>;

/// A call, and its descriptors.
#[derive(Debug)]
pub(crate) struct Prepared {
    /// The call.
    pub call: Call,
    /// Copies of the named descriptors.
    pub fds: Vec<OwnedFd>,
}

/// Prepares the call of a command. Devices are described as on the VMM's own command line.
///
/// # Errors
///
/// Fails if a file or an argument cannot be read.
pub(crate) fn prepare(command: Command) -> Result<Prepared, Error> {
    let (method, endpoint) = endpoint(&command);
    let (mut call, mut fds) = (Call::new(method, endpoint), Vec::new());
    match command {
        Command::Metrics => call.path = "/metrics".to_string(),
        Command::Add(add) => (call.body, fds) = add.content()?,
        Command::Restore { restore } => {
            let mut restore: RestoreConfig = restore.parse()?;
            fds = descriptors(&mut restore.net_fds, &mut restore.backends)?;
            call.body = Some(json(&restore)?);
        }
        Command::ReceiveMigration { config } => {
            let mut config: ReceiveMigration = with_key("receiver_url", config).parse()?;
            fds = descriptors(&mut config.net_fds, &mut config.backends)?;
            call.body = Some(json(&config)?);
        }
        command => call.body = body(command)?,
    }
    Ok(Prepared { call, fds })
}

/// Adds the key of a URL that is given without one.
fn with_key(key: &str, text: String) -> String {
    let is_url = ["tcp:", "unix:"].iter().any(|scheme| text.starts_with(scheme));
    if is_url { format!("{key}={text}") } else { text }
}

/// Duplicates the descriptors of these functions, in the order in which the VMM reads them. Removes their numbers from
/// the body.
fn descriptors(nets: &mut [RestoredNet], backends: &mut [RestoredBackend]) -> Result<Vec<OwnedFd>, Error> {
    let nets = nets.iter_mut().map(|net| &mut net.fds);
    let numbers = nets.chain(backends.iter_mut().map(|backend| &mut backend.fds)).flat_map(take);
    numbers.map(|fd| Ok(duplicate(fd)?)).collect()
}

/// The method and the name of a command's endpoint.
fn endpoint(command: &Command) -> (&'static str, &'static str) {
    match command {
        Command::Counters { .. } => ("GET", "vm.counters"),
        Command::Info | Command::Vfs { .. } => ("GET", "vm.info"),
        Command::Metrics => ("GET", "metrics"),
        Command::Ping => ("GET", "vmm.ping"),
        Command::Add(add) => ("PUT", add.endpoint()),
        Command::Boot => ("PUT", "vm.boot"),
        Command::CancelMigration => ("PUT", "vm.cancel-migration"),
        Command::MigrationProgress => ("GET", "vm.migration-progress"),
        Command::Coredump(_) => ("PUT", "vm.coredump"),
        Command::Create { .. } => ("PUT", "vm.create"),
        Command::Delete => ("PUT", "vm.delete"),
        Command::InjectFault { .. } => ("PUT", "vm.inject-fault"),
        Command::Nmi => ("PUT", "vm.nmi"),
        Command::Pause => ("PUT", "vm.pause"),
        Command::PowerButton => ("PUT", "vm.power-button"),
        Command::Reboot => ("PUT", "vm.reboot"),
        Command::ReceiveMigration { .. } => ("PUT", "vm.receive-migration"),
        Command::RemoveDevice { .. } => ("PUT", "vm.remove-device"),
        Command::Resize { .. } => ("PUT", "vm.resize"),
        Command::ResizeDisk { .. } => ("PUT", "vm.resize-disk"),
        Command::ResizeZone { .. } => ("PUT", "vm.resize-zone"),
        Command::Restore { .. } => ("PUT", "vm.restore"),
        Command::Resume { .. } => ("PUT", "vm.resume"),
        Command::SendMigration { .. } => ("PUT", "vm.send-migration"),
        Command::SetVf { .. } => ("PUT", "vm.set-vf"),
        Command::Shutdown => ("PUT", "vm.shutdown"),
        Command::ShutdownVmm => ("PUT", "vmm.shutdown"),
        Command::Snapshot(_) => ("PUT", "vm.snapshot"),
    }
}

/// The body of a command's call. An unsupported command has none, because the VMM always refuses it.
fn body(command: Command) -> Result<Option<String>, Error> {
    let body = match command {
        Command::Create { file: None, vm } if vm.is_given() => json(&vm.into_config()?),
        Command::Create { file, .. } => {
            let text = read(&file.unwrap_or_else(|| PathBuf::from("-")))?;
            if text.trim().is_empty() {
                return Err("create: there is no JSON; give a file, or the VM's options such as --kernel".into());
            }
            Ok(text)
        }
        Command::InjectFault { id, fault, vf, count, vector } => {
            json(&InjectFault { id, fault, index: vf, count, vector })
        }
        Command::RemoveDevice { id } => json(&RemoveDevice { id }),
        Command::Resize { cpus, memory, balloon } => {
            json(&Resize { desired_vcpus: cpus, desired_ram: memory, desired_balloon: balloon })
        }
        Command::ResizeDisk { disk, size } => json(&ResizeDisk { id: disk, desired_size: size }),
        Command::ResizeZone { id, size } => json(&ResizeZone { id, desired_ram: size }),
        Command::Resume { force: true } => json(&ResumeOptions { force: true }),
        Command::SendMigration { config, .. } => json(&with_key("destination_url", config).parse::<SendMigration>()?),
        Command::SetVf { pf, index, change } => json(&change.into_body(pf, index)),
        Command::Snapshot(to) | Command::Coredump(to) => json(&serde_json::json!({"destination_url": to.url})),
        _ => return Ok(None),
    };
    body.map(Some)
}

fn json(body: &impl Serialize) -> Result<String, Error> {
    Ok(serde_json::to_string(body)?)
}

fn read(path: &Path) -> Result<String, Error> {
    let mut text = String::new();
    let read = match path.to_str() {
        Some("-") => std::io::stdin().read_to_string(&mut text).map(drop),
        _ => std::fs::read_to_string(path).map(|read| text = read),
    };
    read.map_err(|error| format!("create {}: cannot be read: {error}", path.display()))?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use serde_json::{Value, json};

    use super::super::command::Cli;
    use super::*;

    fn command(arguments: &[&str]) -> Result<Prepared, Error> {
        let cli = Cli::try_parse_from([&["ch-remote", "--api-socket", "s"], arguments].concat()).unwrap();
        prepare(cli.command)
    }

    fn call(arguments: &[&str]) -> (String, Option<Value>) {
        let Call { method, path, body } = command(arguments).unwrap().call;
        (format!("{method} {path}"), body.map(|body| serde_json::from_str(&body).unwrap()))
    }

    #[test]
    fn a_command_is_a_call_of_its_endpoint() {
        assert_eq!(call(&["info"]), ("GET /api/v1/vm.info".to_string(), None));
        assert_eq!(call(&["metrics"]), ("GET /metrics".to_string(), None));
        assert_eq!(call(&["shutdown-vmm"]), ("PUT /api/v1/vmm.shutdown".to_string(), None));
        assert_eq!(
            call(&["add-fs", "tag=x,socket=/s"]).1,
            Some(json!({"tag": "x", "socket": "/s", "num_queues": 1, "queue_size": 1024, "pci_segment": 0}))
        );
        assert_eq!(
            call(&["add-pmem", "file=/f,size=4M"]).1,
            Some(json!({"file": "/f", "size": 4 << 20, "discard_writes": false, "pci_segment": 0, "iommu": false}))
        );
        let device = json!({"device_type": 16, "socket": "/s", "queue_sizes": [256, 16], "pci_segment": 0});
        assert_eq!(
            call(&["add-generic-vhost-user", "device_type=gpu,socket=/s,queue_sizes=[256,16]"]),
            ("PUT /api/v1/vm.add-generic-vhost-user".to_string(), Some(device))
        );
        assert_eq!(
            call(&["resize", "--cpus", "2", "--memory", "1G"]).1,
            Some(json!({"desired_vcpus": 2, "desired_ram": 1 << 30}))
        );
        assert_eq!(
            call(&["set-vf", "pf0", "3", "--link", "down"]).1,
            Some(json!({"pf": "pf0", "index": 3, "link": "down"}))
        );
        let fault = ["inject-fault", "pf0", "lose-interrupts", "--vf", "3", "--count", "2", "--vector", "1"];
        let body = json!({"id": "pf0", "fault": "lose-interrupts", "index": 3, "count": 2, "vector": 1});
        assert_eq!(call(&fault), ("PUT /api/v1/vm.inject-fault".to_string(), Some(body)));
        for (index, body) in [("0-63", json!("0-63")), ("*", json!("*"))] {
            let body = json!({"pf": "pf0", "index": body, "spoofchk": true});
            assert_eq!(call(&["set-vf", "pf0", index, "--spoofchk", "on"]).1, Some(body));
        }
        let policy =
            ["--vlan", "100", "--vlan-qos", "3", "--vlan-proto", "802.1ad", "--spoofchk", "on", "--trust", "off"];
        let rest = ["--max-tx-rate", "500", "--min-tx-rate", "9", "--storm", "0", "--trunk", "[7,10-19]"];
        let on_switch = ["--isolated", "on", "--mirror", "4", "--weight", "20"];
        assert_eq!(
            call(&[&["set-vf", "pf0", "3"][..], &policy, &rest, &on_switch].concat()).1,
            Some(json!({
                "pf": "pf0", "index": 3, "vlan": 100, "vlan_qos": 3, "vlan_proto": "802.1ad", "spoofchk": true,
                "trust": false, "max_tx_rate": 500, "min_tx_rate": 9, "storm": 0, "trunk": [7, "10-19"],
                "isolated": true, "mirror": 4, "weight": 20,
            }))
        );
    }

    #[test]
    fn restore_passes_descriptors_in_the_order_of_their_options() {
        let open = [(); 3].map(|()| std::fs::File::open("/dev/null").unwrap());
        let [a, b, c] = open.each_ref().map(std::os::fd::AsRawFd::as_raw_fd);
        let keys = format!("source_url=/s,net_fds=[n@[{a},{b}]],backends=[pf0/0@fd=[{c}]],resume=on");
        let prepared = prepare(Command::Restore { restore: keys }).unwrap();
        let body: Value = serde_json::from_str(&prepared.call.body.unwrap()).unwrap();
        assert_eq!((prepared.fds.len(), &body["net_fds"]), (3, &json!([{"id": "n", "num_fds": 2}])));
        assert_eq!(body["backends"], json!([{"id": "pf0", "vf": 0, "num_fds": 1}]));
        assert_eq!(call(&["snapshot", "file:///s"]).1, Some(json!({"destination_url": "file:///s"})));
    }

    #[test]
    fn a_migration_is_described_by_keys_and_its_target_by_a_url_too() {
        let url = Some(json!({
            "receiver_url": "unix:/s", "memory_mode": "Precopy", "timeout_s": 3600, "detach": false,
            "on_missing_backend": "refuse",
        }));
        assert_eq!(call(&["receive-migration", "unix:/s"]).1, url);
        assert_eq!(call(&["receive-migration", "receiver_url=unix:/s"]).1, url);
        assert_eq!(
            call(&["send-migration", "unix:/s"]),
            call(&["send-migration", "destination_url=unix:/s", "--wait"])
        );
        let (_, body) = call(&["send-migration", "destination_url=tcp:h:1,connections=4,timeout_strategy=ignore"]);
        let body = body.unwrap();
        assert_eq!((&body["connections"], &body["timeout_strategy"]), (&json!(4), &json!("Ignore")));
        assert_eq!(call(&["resume", "--force"]).1, Some(json!({"force": true})));
        assert_eq!(call(&["resume"]).1, None);
    }

    #[test]
    fn a_nic_is_read_as_by_the_vmm() {
        let (_, body) = call(&["add-net", "id=pf0,tap=t0,sriov_vfs=2", "--vf", "index=1,tap=t1"]);
        let body = body.unwrap();
        assert_eq!((&body["id"], &body["sriov_vfs"], &body["vfs"][0]["tap"]), (&json!("pf0"), &json!(2), &json!("t1")));
        serde_json::from_value::<vm_api::config::NetConfig>(body).unwrap();
    }

    #[test]
    fn a_vm_is_described_by_the_options_of_the_vmm() {
        let (path, body) = call(&["create", "--kernel", "k", "--net", "id=a", "--memory", "size=1G"]);
        assert_eq!(path, "PUT /api/v1/vm.create");
        let config = vm_api::config::VmConfig::from_json(body.unwrap().to_string().as_bytes()).unwrap();
        assert_eq!((config.memory.size, config.net.len()), (1 << 30, 1));
    }

    #[test]
    fn descriptors_are_passed_and_not_named() {
        let refused = command(&["add-net", "fd=[1]"]).unwrap_err().to_string();
        assert_eq!(refused, "fd=1: a standard stream, not a tap or a device; open that as 3 or above");
        let open = std::fs::File::open("/dev/null").unwrap();
        let net = format!("id=a,fd=[{}]", std::os::fd::AsRawFd::as_raw_fd(&open));
        let prepared = command(&["add-net", &net]).unwrap();
        assert_eq!(prepared.fds.len(), 1);
        assert!(!prepared.call.body.unwrap().contains("fds"));
        let device = format!("id=d,fd={}", std::os::fd::AsRawFd::as_raw_fd(&open));
        let prepared = command(&["add-device", &device]).unwrap();
        assert_eq!(prepared.fds.len(), 1);
        let body: Value = serde_json::from_str(&prepared.call.body.unwrap()).unwrap();
        assert_eq!(body, json!({"id": "d", "pci_segment": 0, "iommu": false}));
    }
}
