"""The life of a VM, driven by the Python client that openapi-generator makes of api/openapi.yaml. The argument is the
URL of the API."""

import sys

import openapi_client as api


def refused(status, request, *arguments):
    try:
        request(*arguments)
    except api.ApiException as error:
        assert error.status == status and error.body.startswith('["'), error
    else:
        raise AssertionError(f"the request was not refused with {status}")


vmm = api.DefaultApi(api.ApiClient(api.Configuration(host=sys.argv[1])))
assert vmm.vmm_ping_get().version == "53.0.0"
vmm.create_vm(
    api.VmConfig(
        payload=api.PayloadConfig(kernel="kernel"),
        cpus=api.CpusConfig(boot_vcpus=2),
        memory=api.MemoryConfig(size=64 << 20, hotplug_method=api.HotplugMethod.HotplugMethodVirtioMem),
        net=[api.NetConfig(id="pf0", tap="pf0", sriov_vfs=4, vfs=[api.VfConfig(index=api.VfRange(1), tap="tenant")])],
        console=api.ConsoleConfig(mode="Off"),
    )
)
assert vmm.vm_info_get().state.value == "Created"
vmm.boot_vm()
info = vmm.vm_info_get()
assert info.state.value == "Running" and info.config.memory.hotplug_method.value == "VirtioMem"
assert info.sriov[0].total_vfs == 4

assert vmm.vm_add_net_put(api.NetConfig(id="n", tap="n")).id == "n"
vmm.vm_set_vf_put(api.VmSetVf(pf="pf0", index=api.VfRange(1), link="down"))
assert vmm.vm_info_get().sriov[0].vfs[1].link.value == "down"
vmm.pause_vm()
vmm.resume_vm()
assert "pf0v1" in vmm.vm_counters_get()

refused(400, vmm.vm_add_disk_put, api.DiskConfig(path="/nonexistent/disk"))
vmm.delete_vm()
refused(404, vmm.vm_info_get)
