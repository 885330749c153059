// The MPI operator's controller as it is, in a process of our own: the operator's main also serves health on port
// 8080 of every interface and elects a leader, neither of which a test wants.
//
// mpi-operator KUBECONFIG [CLUSTER-DOMAIN]
//
// CLUSTER-DOMAIN is the operator's option --cluster-domain.
package main

import (
	"context"
	"log"
	"os"
	"os/signal"
	"syscall"

	"github.com/kubeflow/mpi-operator/cmd/mpi-operator/app/options"
	clientset "github.com/kubeflow/mpi-operator/pkg/client/clientset/versioned"
	"github.com/kubeflow/mpi-operator/pkg/client/clientset/versioned/scheme"
	mpiinformers "github.com/kubeflow/mpi-operator/pkg/client/informers/externalversions"
	"github.com/kubeflow/mpi-operator/pkg/controller"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	kubescheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/clientcmd"
)

const (
	requestsPerSecond = 1000
	workers           = 2
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	settings := &options.ServerOption{ControllerRateLimit: requestsPerSecond, ControllerBurst: requestsPerSecond}
	if len(os.Args) > 2 {
		settings.ClusterDomain = os.Args[2]
	}
	if err := run(ctx, os.Args[1], settings); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, kubeconfig string, settings *options.ServerOption) error {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	config.QPS, config.Burst = requestsPerSecond, requestsPerSecond
	// The controller records events about MPIJobs with the scheme of the core types.
	if err := scheme.AddToScheme(kubescheme.Scheme); err != nil {
		return err
	}
	kube, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	jobs, err := clientset.NewForConfig(config)
	if err != nil {
		return err
	}
	core := informers.NewSharedInformerFactory(kube, 0)
	mpi := mpiinformers.NewSharedInformerFactory(jobs, 0)
	operator, err := controller.NewMPIJobController(
		ctx, kube, jobs, nil, nil,
		core.Core().V1().ConfigMaps(), core.Core().V1().Secrets(), core.Core().V1().Services(),
		core.Batch().V1().Jobs(), core.Core().V1().Pods(), core.Scheduling().V1().PriorityClasses(),
		mpi.Kubeflow().V2beta1().MPIJobs(), settings,
	)
	if err != nil {
		return err
	}
	core.Start(ctx.Done())
	mpi.Start(ctx.Done())
	return operator.Run(workers, ctx.Done())
}
