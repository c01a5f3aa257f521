//! `cloud-hypervisor-client` from the crates registry, generated from Cloud Hypervisor's API description: the requests
//! that `registry_client.rs` does not make.

use std::fs::{self, File};
use std::path::Path;

use cloud_hypervisor_client::apis::{DefaultApi, Error};
use cloud_hypervisor_client::models::{
    BalloonConfig, ConsoleConfig, ConsoleMode, CpusConfig, DeviceConfig, DiskConfig, FsConfig, GenericVhostUserConfig,
    MemoryConfig, PayloadConfig, PlatformConfig, ReceiveMigrationData, RestoreConfig, SendMigrationData,
    VmAddUserDevice, VmConfig, VmCoredumpData, VmRemoveDevice, VmResize, VmResizeDisk, VmSnapshotConfig, VsockConfig,
};
use cloud_hypervisor_client::{SocketBasedApiClient, socket_based_api_client};

use super::folder::Folder;
use crate::rig::vmm::Vmm;

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

fn text(path: &Path) -> String {
    path.to_str().unwrap().to_owned()
}

/// Boots a VM whose memory and number of vCPUs can grow, with a balloon and two segments.
async fn boot(vmm: &Vmm) -> SocketBasedApiClient {
    let client = socket_based_api_client(vmm.socket());
    let payload = PayloadConfig { kernel: Some(vmm.files.idle_kernel()), ..PayloadConfig::default() };
    let memory = MemoryConfig { shared: Some(true), hotplug_size: Some(1 << 30), ..MemoryConfig::new(256 << 20) };
    let config = VmConfig {
        cpus: Some(CpusConfig::new(1, 4)),
        memory: Some(memory),
        balloon: Some(BalloonConfig::new(0)),
        platform: Some(PlatformConfig { num_pci_segments: Some(2), ..PlatformConfig::default() }),
        console: Some(ConsoleConfig::new(ConsoleMode::Off)),
        ..VmConfig::new(payload)
    };
    client.create_vm(config).await.unwrap();
    client.boot_vm().await.unwrap();
    client
}

#[test]
fn a_running_vm_is_resized_and_given_devices() {
    let vmm = Vmm::start();
    let path = |name: &str| vmm.files.path(name);
    let _folder = Folder::listen(&path("virtiofs.sock"));
    File::create(path("disk")).unwrap().set_len(1 << 20).unwrap();
    runtime().block_on(async {
        let client = boot(&vmm).await;
        let fs =
            FsConfig { pci_segment: Some(1), ..FsConfig::new("tag".into(), text(&path("virtiofs.sock")), 1, 1024) };
        assert_eq!(client.vm_add_fs_put(fs).await.unwrap().bdf, "0001:00:01.0");
        let vsock = client.vm_add_vsock_put(VsockConfig::new(3, text(&path("vsock")))).await.unwrap();
        assert!(path("vsock").exists());
        let disk = DiskConfig { path: Some(text(&path("disk"))), id: Some("d".into()), ..DiskConfig::default() };
        assert_eq!(client.vm_add_disk_put(disk).await.unwrap().id, "d");
        let resize = VmResizeDisk { id: Some("d".into()), desired_size: Some(2 << 20) };
        client.vm_resize_disk_put(resize).await.unwrap();
        assert_eq!(fs::metadata(path("disk")).unwrap().len(), 2 << 20);

        let resize = VmResize { desired_ram: Some(512 << 20), desired_vcpus: Some(2), ..VmResize::default() };
        client.vm_resize_put(resize).await.unwrap();
        client.vm_resize_put(VmResize { desired_balloon: Some(64 << 20), ..VmResize::default() }).await.unwrap();
        let config = client.vm_info_get().await.unwrap().config;
        let sizes = (config.memory.unwrap().size, config.cpus.unwrap().boot_vcpus, config.balloon.unwrap().size);
        assert_eq!(sizes, (512 << 20, 2, 64 << 20));

        client.vm_remove_device_put(VmRemoveDevice { id: Some(vsock.id) }).await.unwrap();
        client.power_button_vm().await.unwrap();
        client.vmm_nmi_put().await.unwrap();
        assert!(client.vm_counters_get().await.unwrap().contains_key("d"));
        client.delete_vm().await.unwrap();
    });
}

/// The status of a reply that must be an error.
fn status<T: std::fmt::Debug>(answer: Result<T, Error>) -> u16 {
    match answer {
        Err(Error::Api(error)) => error.code.as_u16(),
        other => panic!("{other:?}"),
    }
}

/// The API description has a key of generic devices that Cloud Hypervisor does not have, so this client cannot add one
/// there either.
#[test]
fn an_unsupported_endpoint_has_a_status_of_its_own() {
    let vmm = Vmm::start();
    runtime().block_on(async {
        let client = boot(&vmm).await;
        let device =
            GenericVhostUserConfig { queue_size: Some(vec![64]), ..GenericVhostUserConfig::new("s".into(), 25) };
        assert_eq!(status(client.vm_add_generic_vhost_user_put(device).await), 400);
        let url = || "file:///nonexistent".to_owned();
        let answers = [
            status(client.vm_add_user_device_put(VmAddUserDevice::new("/nonexistent/s".into())).await),
            status(client.vm_coredump_put(VmCoredumpData { destination_url: Some(url()) }).await),
        ];
        assert_eq!(answers, [501; 2]);
        let device = DeviceConfig::new("/sys/bus/pci/devices/nowhere".into());
        assert_eq!(status(client.vm_add_device_put(device).await), 400);
        // A VM migrates over a connection, and only to a VMM without one.
        assert_eq!(status(client.vm_send_migration_put(SendMigrationData::new(url())).await), 400);
        assert_eq!(status(client.vm_receive_migration_put(ReceiveMigrationData::new(url())).await), 409);
        // The VM runs, and is not paused.
        let snapshot = VmSnapshotConfig { destination_url: Some(url()) };
        assert_eq!(status(client.vm_snapshot_put(snapshot).await), 409);
        assert_eq!(status(client.vm_restore_put(RestoreConfig::new(url())).await), 409);
        assert_eq!(client.vm_info_get().await.unwrap().config.devices, None);
    });
}
