//! `cloud-hypervisor-client` from the crates registry, generated from Cloud Hypervisor's API description, manages a VM
//! through its life.
//!
//! The client's types lack `sriov_vfs`, and it cannot send a custom body, so requests for VFs are sent by our own
//! client.

use cloud_hypervisor_client::apis::{DefaultApi, Error};
use cloud_hypervisor_client::models::{
    ConsoleConfig, ConsoleMode, CoreSchedulingMode, CpusConfig, DiskConfig, ImageType, LockGranularity, MemoryConfig,
    NetConfig, PayloadConfig, VmConfig, VmInfo, VmRemoveDevice, VmState,
};
use cloud_hypervisor_client::{SocketBasedApiClient, socket_based_api_client};
use serde_json::json;

use crate::rig::vmm::{Vmm, taps};

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

fn net(id: &str, tap: &str) -> NetConfig {
    NetConfig { id: Some(id.to_string()), tap: Some(tap.to_string()), ..NetConfig::default() }
}

fn config(vmm: &Vmm, net: Vec<NetConfig>) -> VmConfig {
    let payload = PayloadConfig { kernel: Some(vmm.files.idle_kernel()), ..PayloadConfig::default() };
    VmConfig {
        cpus: Some(CpusConfig::new(2, 2)),
        memory: Some(MemoryConfig::new(64 << 20)),
        net: Some(net),
        console: Some(ConsoleConfig::new(ConsoleMode::Off)),
        ..VmConfig::new(payload)
    }
}

fn ids(info: &VmInfo) -> Vec<&str> {
    info.config.net.iter().flatten().filter_map(|net| net.id.as_deref()).collect()
}

async fn state(client: &SocketBasedApiClient) -> VmState {
    client.vm_info_get().await.unwrap().state
}

/// Removes a device whose guest does not release it: it stays until the reboot.
async fn remove(client: &SocketBasedApiClient, id: &str) {
    client.vm_remove_device_put(VmRemoveDevice { id: Some(id.to_string()) }).await.unwrap();
    assert!(ids(&client.vm_info_get().await.unwrap()).contains(&id), "{id} was removed while the guest used it");
    client.reboot_vm().await.unwrap();
    assert!(!ids(&client.vm_info_get().await.unwrap()).contains(&id), "{id} is still there after a reboot");
}

#[test]
fn a_vm_with_vfs_is_created_booted_changed_and_shut_down() {
    let vmm = Vmm::start();
    let client = socket_based_api_client(vmm.socket());
    runtime().block_on(async {
        assert_eq!(client.vmm_ping_get().await.unwrap().version, "53.0.0");
        client.create_vm(config(&vmm, vec![net("plain", "apcplain")])).await.unwrap();
        assert_eq!(state(&client).await, VmState::Created);
        let pf = json!({"id": "pf0", "tap": "apcpf", "sriov_vfs": 8, "vfs": [{"index": 3, "tap": "apctenant"}]});
        vmm.client().put_json("vm.add-net", &pf).expect(204);
        client.boot_vm().await.unwrap();

        let info = client.vm_info_get().await.unwrap();
        assert_eq!((info.state, ids(&info)), (VmState::Running, vec!["plain", "pf0"]));
        assert_eq!(info.device_tree.unwrap()["_virtio-pci-pf0"].pci_bdf.as_deref(), Some("0000:00:02.0"));
        assert_eq!(taps("apc").len(), 10);
        assert!(taps("apc").contains(&"apctenant".to_string()));
        let counters = client.vm_counters_get().await.unwrap();
        assert_eq!(counters["pf0v7"]["rx_frames"], 0);

        let added = client.vm_add_net_put(net("hot", "apchot")).await.unwrap();
        assert_eq!((added.id.as_str(), added.bdf.as_str()), ("hot", "0000:00:04.0"));
        let hot_pf = json!({"id": "pf1", "tap": "apcq", "sriov_vfs": 2});
        vmm.client().put_json("vm.add-net", &hot_pf).expect(200);
        assert_eq!(taps("apcq"), ["apcq", "apcqv0", "apcqv1"]);
        remove(&client, "pf1").await;
        assert_eq!(taps("apcq"), Vec::<String>::new());

        client.pause_vm().await.unwrap();
        assert_eq!(state(&client).await, VmState::Paused);
        client.resume_vm().await.unwrap();
        assert_eq!(state(&client).await, VmState::Running);
        client.shutdown_vm().await.unwrap();
        assert_eq!((state(&client).await, taps("apc").len()), (VmState::Shutdown, 0));
        client.delete_vm().await.unwrap();
        client.shutdown_vmm().await.unwrap();
    });
    assert_eq!(vmm.end(), Some(0));
}

/// This client parses a JSON document in every reply to an add. Before the boot the reply is 204 without a body, as
/// Cloud Hypervisor's is, so the client reports an error.
#[test]
fn a_nic_added_before_boot_exists_despite_a_reply_without_json() {
    let vmm = Vmm::start();
    let client = socket_based_api_client(vmm.socket());
    runtime().block_on(async {
        client.create_vm(config(&vmm, Vec::new())).await.unwrap();
        let answer = client.vm_add_net_put(net("early", "apdearly")).await;
        assert!(matches!(answer, Err(Error::Serde(_))), "{answer:?}");
        assert_eq!(ids(&client.vm_info_get().await.unwrap()), ["early"]);
    });
}

#[test]
fn a_refused_request_has_its_status_and_its_reasons() {
    let vmm = Vmm::start();
    let client = socket_based_api_client(vmm.socket());
    runtime().block_on(async {
        let Err(Error::Api(error)) = client.vm_info_get().await else { panic!("there is no VM") };
        assert_eq!(error.code, 404);
        assert!(error.body.contains("vm.create"), "{}", error.body);
        client.create_vm(config(&vmm, vec![net("a", "ape")])).await.unwrap();
        let Err(Error::Api(error)) = client.vm_add_net_put(net("a", "ape1")).await else { panic!("it is used") };
        assert_eq!(error.code, 409);
        let disk = DiskConfig { path: Some("/nonexistent/disk".to_string()), ..DiskConfig::default() };
        client.boot_vm().await.unwrap();
        let Err(Error::Api(error)) = client.vm_add_disk_put(disk).await else { panic!("there is no such file") };
        assert_eq!(error.code, 400);
        assert!(error.body.contains("truncate -s"), "{}", error.body);
    });
}

/// The reply's configuration has a value wherever Cloud Hypervisor's has one, with the generated types' names.
#[test]
fn the_configuration_has_every_default_of_cloud_hypervisors() {
    let vmm = Vmm::start();
    let client = socket_based_api_client(vmm.socket());
    runtime().block_on(async {
        let payload = PayloadConfig { kernel: Some(vmm.files.idle_kernel()), ..PayloadConfig::default() };
        let disk = DiskConfig { path: Some("/nonexistent/disk".to_string()), ..DiskConfig::default() };
        let address = ("192.168.249.1".to_string(), "255.255.255.0".to_string());
        let nic = NetConfig { ip: Some(address.0.clone()), mask: Some(address.1.clone()), ..net("n", "apf") };
        client
            .create_vm(VmConfig { disks: Some(vec![disk]), net: Some(vec![nic]), ..VmConfig::new(payload) })
            .await
            .unwrap();
        let config = client.vm_info_get().await.unwrap().config;
        assert_eq!(
            (config.iommu, config.watchdog, config.pvpanic, config.landlock_enable),
            (Some(false), Some(false), Some(false), Some(false))
        );
        assert_eq!(config.console.unwrap().mode, ConsoleMode::Tty);
        assert_eq!(config.serial.unwrap().mode, ConsoleMode::Null);
        let debug = config.debug_console.unwrap();
        assert_eq!((debug.mode, debug.iobase), (ConsoleMode::Off, Some(233)));
        let cpus = config.cpus.unwrap();
        assert_eq!(
            (cpus.kvm_hyperv, cpus.max_phys_bits, cpus.nested, cpus.features.unwrap().amx, cpus.core_scheduling),
            (Some(false), Some(46), Some(true), Some(false), Some(CoreSchedulingMode::Vm))
        );
        let memory = config.memory.unwrap();
        assert_eq!(
            (memory.mergeable, memory.hotplug_method.as_deref(), memory.thp),
            (Some(false), Some("Acpi"), Some(true))
        );
        let disk = &config.disks.unwrap()[0];
        assert_eq!((disk.vhost_user, disk.backing_files, disk.sparse), (Some(false), Some(false), Some(true)));
        assert_eq!(
            (disk.image_type, disk.lock_granularity, disk.pci_segment),
            (Some(ImageType::Unknown), Some(LockGranularity::ByteRange), Some(0))
        );
        let nic = &config.net.unwrap()[0];
        assert_eq!((nic.ip.as_ref(), nic.mask.as_ref()), (Some(&address.0), Some(&address.1)));
        assert_eq!(
            (nic.vhost_user, nic.vhost_mode.as_deref(), nic.pci_segment),
            (Some(false), Some("Client"), Some(0))
        );
    });
}
