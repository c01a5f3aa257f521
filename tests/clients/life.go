// The life of a VM, driven by the Go client that openapi-generator makes of api/openapi.yaml. The argument is the URL
// of the API.
package main

import (
	"context"
	"fmt"
	"net/http"
	"os"

	api "github.com/GIT_USER_ID/GIT_REPO_ID"
)

func check(is bool, what string, found any) {
	if !is {
		fmt.Fprintf(os.Stderr, "%s: %v\n", what, found)
		os.Exit(1)
	}
}

func done(answer *http.Response, err error) {
	check(err == nil, "a request failed", err)
	check(answer.StatusCode == 204, "another status than 204", answer.Status)
}

func pointer[T any](value T) *T {
	return &value
}

func config() api.VmConfig {
	vf := api.NewVfConfig(api.Int32AsVfRange(api.PtrInt32(1)))
	vf.SetTap("tenant")
	pf := api.NetConfig{Vfs: []api.VfConfig{*vf}}
	pf.SetId("pf0")
	pf.SetTap("pf0")
	pf.SetSriovVfs(4)
	config := api.NewVmConfig(api.PayloadConfig{Kernel: *api.NewNullableString(pointer("kernel"))})
	config.Net = []api.NetConfig{pf}
	config.Cpus = *api.NewNullableCpusConfig(api.NewCpusConfig())
	config.Cpus.Get().SetBootVcpus(2)
	config.Memory = *api.NewNullableMemoryConfig(api.NewMemoryConfig())
	config.Memory.Get().SetSize(64 << 20)
	config.Memory.Get().SetHotplugMethod(api.HotplugMethodVirtioMem)
	config.Console = *api.NewNullableConsoleConfig(api.NewConsoleConfig(api.ConsoleModeOff))
	return *config
}

func main() {
	configuration := api.NewConfiguration()
	configuration.Servers = api.ServerConfigurations{{URL: os.Args[1]}}
	vmm, context := api.NewAPIClient(configuration).DefaultAPI, context.Background()
	info := func() *api.VmInfo {
		info, _, err := vmm.VmInfoGet(context).Execute()
		check(err == nil, "vm.info", err)
		return info
	}

	ping, _, err := vmm.VmmPingGet(context).Execute()
	check(err == nil && ping.GetVersion() == "53.0.0", "vmm.ping", err)
	done(vmm.CreateVM(context).VmConfig(config()).Execute())
	check(info().State == api.VmStateCreated, "the state", info().State)
	done(vmm.BootVM(context).Execute())
	running := info()
	check(running.State == api.VmStateRunning, "the state", running.State)
	memory := running.Config.GetMemory()
	check(memory.GetHotplugMethod() == api.HotplugMethodVirtioMem, "hotplug_method", memory.GetHotplugMethod())
	check(running.Sriov[0].TotalVfs == 4, "total_vfs", running.Sriov[0].TotalVfs)

	nic := api.NewNetConfig()
	nic.SetId("n")
	nic.SetTap("n")
	added, _, err := vmm.VmAddNetPut(context).NetConfig(*nic).Execute()
	check(err == nil && added.Id == "n", "vm.add-net", err)
	change := api.NewVmSetVf("pf0")
	change.SetIndex(api.Int32AsVfRange(api.PtrInt32(1)))
	change.SetLink(api.LinkPolicyDown)
	done(vmm.VmSetVfPut(context).VmSetVf(*change).Execute())
	check(info().Sriov[0].Vfs[1].Link == api.LinkDown, "the link", info().Sriov[0].Vfs[1].Link)
	done(vmm.PauseVM(context).Execute())
	done(vmm.ResumeVM(context).Execute())
	counters, _, err := vmm.VmCountersGet(context).Execute()
	check(err == nil && (*counters)["pf0v1"] != nil, "vm.counters", err)

	disk := api.NewDiskConfig()
	disk.SetPath("/nonexistent/disk")
	_, answer, err := vmm.VmAddDiskPut(context).DiskConfig(*disk).Execute()
	check(err != nil && answer.StatusCode == 400, "vm.add-disk", err)
	done(vmm.DeleteVM(context).Execute())
	_, answer, err = vmm.VmInfoGet(context).Execute()
	check(err != nil && answer.StatusCode == 404, "vm.info", err)
}
