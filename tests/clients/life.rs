//! The life of a VM, driven by the Rust client that openapi-generator makes of api/openapi.yaml. The argument is the
//! URL of the API.

use openapi::apis::Error;
use openapi::apis::configuration::Configuration;
use openapi::apis::default_api::*;
use openapi::models::*;

fn config() -> VmConfig {
    let vfs = Some(Some(vec![VfConfig { tap: some("tenant"), ..VfConfig::new(VfRange::Integer(1)) }]));
    let pf = NetConfig { id: some("pf0"), tap: some("pf0"), sriov_vfs: Some(Some(4)), vfs, ..NetConfig::new() };
    VmConfig {
        cpus: Some(Some(Box::new(CpusConfig { boot_vcpus: Some(Some(2)), ..CpusConfig::new() }))),
        memory: Some(Some(Box::new(MemoryConfig {
            size: Some(Some(64 << 20)),
            hotplug_method: Some(Some(HotplugMethod::HotplugMethodVirtioMem)),
            ..MemoryConfig::new()
        }))),
        net: Some(Some(vec![pf])),
        console: Some(Some(Box::new(ConsoleConfig::new(ConsoleMode::ConsoleModeOff)))),
        ..VmConfig::new(PayloadConfig { kernel: some("kernel"), ..PayloadConfig::new() })
    }
}

fn some(text: &str) -> Option<Option<String>> {
    Some(Some(text.to_string()))
}

fn status<T: std::fmt::Debug, E>(answer: Result<T, Error<E>>) -> u16 {
    match answer {
        Err(Error::ResponseError(answer)) => answer.status.as_u16(),
        Err(error) => panic!("{error}"),
        Ok(answer) => panic!("{answer:?}"),
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let vmm = &Configuration { base_path: std::env::args().nth(1).unwrap(), ..Configuration::new() };
    assert_eq!(vmm_ping_get(vmm).await.unwrap().version, "53.0.0");
    create_vm(vmm, config()).await.unwrap();
    assert_eq!(vm_info_get(vmm).await.unwrap().state, VmState::VmStateCreated);
    boot_vm(vmm).await.unwrap();
    let info = vm_info_get(vmm).await.unwrap();
    assert_eq!((info.state, info.sriov.unwrap()[0].total_vfs), (VmState::VmStateRunning, 4));
    let memory = info.config.memory.flatten().unwrap();
    assert_eq!(memory.hotplug_method, Some(Some(HotplugMethod::HotplugMethodVirtioMem)));

    let nic = NetConfig { id: some("n"), tap: some("n"), ..NetConfig::new() };
    assert_eq!(vm_add_net_put(vmm, nic).await.unwrap().id, "n");
    let link = Some(Some(LinkPolicy::LinkPolicyDown));
    let index = Some(Some(Box::new(VfRange::Integer(1))));
    vm_set_vf_put(vmm, VmSetVf { index, link, ..VmSetVf::new("pf0".to_string()) }).await.unwrap();
    assert_eq!(vm_info_get(vmm).await.unwrap().sriov.unwrap()[0].vfs[1].link, Link::LinkDown);
    pause_vm(vmm).await.unwrap();
    resume_vm(vmm, None).await.unwrap();
    assert!(vm_counters_get(vmm).await.unwrap().contains_key("pf0v1"));

    let disk = DiskConfig { path: some("/nonexistent/disk"), ..DiskConfig::new() };
    assert_eq!(status(vm_add_disk_put(vmm, disk).await), 400);
    delete_vm(vmm).await.unwrap();
    assert_eq!(status(vm_info_get(vmm).await), 404);
}
