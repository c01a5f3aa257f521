// The part of a kubelet that device plugins use. It waits for the registration of a number of resources, and for each
// prints a line of JSON with its devices and what the first of them brings into a container's environment.
//
//	kubelet 2        # of two resources
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sort"
	"strconv"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

type registry struct{ registered chan *api.RegisterRequest }

func (r registry) Register(_ context.Context, request *api.RegisterRequest) (*api.Empty, error) {
	r.registered <- request
	return &api.Empty{}, nil
}

type resource struct {
	Resource string            `json:"resource"`
	Devices  []string          `json:"devices"`
	Env      map[string]string `json:"env"`
}

func main() {
	if err := run(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "kubelet:", err)
		os.Exit(1)
	}
}

func run(count string) error {
	wanted, err := strconv.Atoi(count)
	if err != nil {
		return err
	}
	listener, err := net.Listen("unix", api.KubeletSocket)
	if err != nil {
		return err
	}
	kubelet := registry{make(chan *api.RegisterRequest)}
	server := grpc.NewServer()
	api.RegisterRegistrationServer(server, kubelet)
	go server.Serve(listener)
	defer server.Stop()
	for ; wanted > 0; wanted-- {
		found, err := ask(<-kubelet.registered)
		if err != nil {
			return err
		}
		if err := json.NewEncoder(os.Stdout).Encode(found); err != nil {
			return err
		}
	}
	return nil
}

// The devices of a plugin that has registered, and the environment of a container that gets the first.
func ask(request *api.RegisterRequest) (*resource, error) {
	path := "unix:" + filepath.Join(api.DevicePluginPath, request.Endpoint)
	connection, err := grpc.Dial(path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	defer connection.Close()
	plugin := api.NewDevicePluginClient(connection)
	stream, err := plugin.ListAndWatch(context.Background(), &api.Empty{})
	if err != nil {
		return nil, err
	}
	list, err := stream.Recv()
	if err != nil {
		return nil, err
	}
	found := &resource{Resource: request.ResourceName}
	for _, device := range list.Devices {
		if device.Health == api.Healthy {
			found.Devices = append(found.Devices, device.ID)
		}
	}
	sort.Strings(found.Devices)
	container := &api.ContainerAllocateRequest{DevicesIDs: found.Devices[:1]}
	answer, err := plugin.Allocate(context.Background(),
		&api.AllocateRequest{ContainerRequests: []*api.ContainerAllocateRequest{container}})
	if err != nil {
		return nil, err
	}
	found.Env = answer.ContainerResponses[0].Envs
	return found, nil
}
